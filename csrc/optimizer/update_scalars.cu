// The scalars of a training step: the decisions that fairseq makes on the host between computing
// the gradient norm and Adam.
//
//   multiplier = 1 / (loss scale * sample size)      total = norm * multiplier
//   total finite:      the update is counted; after scale_window updates without overflow the
//                      loss scale is doubled
//   total not finite:  the multiplier for Adam becomes NaN, so Adam changes nothing; the loss scale
//                      is halved if the share of overflows reaches `tolerance`. If the scale would
//                      fall to min_loss_scale, or without loss scaling, all later updates are
//                      skipped
//
// The host sends the learning rates of several updates. The kernel selects one by the number of
// updates that were not skipped: the host's count may be too high, because the host learns of a
// skipped update only later.
//
//   bytes moved    some 200 bytes, by one thread; the time is that of a launch
//   determinism    float64 arithmetic, in the same order as the reference, ops/update_scalars.py
//
// Source of the rules: fairseq.optim.dynamic_loss_scaler.DynamicLossScaler.

#include "common/check.h"
#include "common/launch.cuh"
#include "common/scalars.cuh"

namespace lightseq {
namespace {

// Same fields in the same order as State, StopReason and Given of ops/update_scalars.py.
struct State {
  double num_updates;
  double loss_scale;
  double scaler_iter, last_overflow_iter, last_rescale_iter, overflows_since_rescale;
  double stopped;
  double skipped;
  double norm, rate, multiplier;
  double sums[4];
};

enum StopReason : int { kRunning = 0, kNotFinite = 1, kLeastScale = 2 };

constexpr int kKnownRates = 10;

struct Given {
  double num_updates;
  double sample_size;
  double rates[kKnownRates];
};

struct Scaling {
  int64_t window;
  double tolerance, threshold, least;
};

__device__ void overflow(State& s, const Scaling& scaling) {
  const double since_rescale = s.scaler_iter - s.last_rescale_iter;
  const double before = s.loss_scale;
  s.last_overflow_iter = s.scaler_iter;
  s.overflows_since_rescale += 1.0;
  if (s.overflows_since_rescale >= scaling.tolerance * since_rescale) {
    s.loss_scale = fmax(before / 2.0, scaling.threshold);
    s.last_rescale_iter = s.scaler_iter;
    s.overflows_since_rescale = 0.0;
  }
  if (s.loss_scale <= scaling.least) {
    s.loss_scale = before;
    s.stopped = kLeastScale;
  } else {
    s.scaler_iter += 1.0;
  }
}

__global__ void update_scalars_kernel(State* __restrict__ state, int64_t* __restrict__ rng,
                                      const Given* __restrict__ given, Floats norm, int64_t seed,
                                      Scaling scaling) {
  State s = *state;
  const double multiplier = 1.0 / (s.loss_scale * given->sample_size);
  const double total = norm.at<double>(0) * multiplier;
  const bool was_running = s.stopped == kRunning;
  const bool is_finite = isfinite(total) && was_running;
  const double behind = fmin(fmax(given->num_updates - s.num_updates, 0.0), kKnownRates - 1.0);

  s.rate = given->rates[static_cast<int>(behind)];
  s.multiplier = is_finite ? multiplier : NAN;
  s.norm = total;
  s.skipped = !is_finite;
  if (is_finite) {
    s.num_updates += 1.0;
    if (scaling.window > 0) {
      const int64_t clean = static_cast<int64_t>(s.scaler_iter - s.last_overflow_iter);
      if (clean % scaling.window == 0) {
        s.loss_scale *= 2.0;
        s.last_rescale_iter = s.scaler_iter;
      }
      s.scaler_iter += 1.0;
    }
  } else if (was_running) {
    if (scaling.window > 0) {
      overflow(s, scaling);
    } else {
      s.stopped = kNotFinite;
    }
  }
  *state = s;
  rng[0] = seed + static_cast<int64_t>(s.num_updates);
  rng[1] = 0;
}

void update_scalars(Tensor state, Tensor rng, const Tensor& given, const Tensor& norm, int64_t seed,
                    int64_t scale_window, double tolerance, double threshold,
                    double min_loss_scale) {
  require(state.is_contiguous() && rng.is_contiguous() && given.is_contiguous(),
          "update_scalars: state, rng and given must be contiguous");
  const DeviceGuard guard(state.get_device());
  launch({.op = "update_scalars", .grid = 1, .block = 1}, update_scalars_kernel,
         static_cast<State*>(state.mutable_data_ptr()), rng.mutable_data_ptr<int64_t>(),
         data_of<Given>(given), Floats(norm), seed,
         Scaling{.window = scale_window,
                 .tolerance = tolerance,
                 .threshold = threshold,
                 .least = min_loss_scale});
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("update_scalars", TORCH_BOX(&update_scalars));
}

}  // namespace
}  // namespace lightseq
