// Linear layers: y = x W^T + b. T rows (tokens), K inputs, N outputs.
//
//   forward    y  [T, N]   = x W^T + b             or an activation, for linear_activation_fwd
//   backward   dx [T, K]   = dy W
//              dW [N, K] (+)= dy^T x          overwrites or accumulates (+)= in place
//              db [N]    (+)= column sum of dy
//
// matmul.cu computes the products: forward's of at most 16 rows in 16-bit types, as in decoding,
// with few_rows.cu, all others with cuBLASLt or, forward's of at most 128 rows in 16-bit types,
// with tiles.cu if that is faster. All accumulate in float32, and float32 operands are multiplied
// in float32, without TF32. This file prepares their operands, and computes db. linear_fp8.cu has
// the products of operands in E4M3.
//
//   saved for backward   nothing
//   bytes moved          each operand read once, each result written once, dy once more for db
//   determinism          The same input gives the same bits if the table of algorithms is the same
//                        (matmul.cu). All algorithms, and db, sum in a fixed order.
//
// Layout. cuBLASLt is four to seven times slower if rows do not start on 16-byte boundaries, or if
// their length is no multiple of 16 bytes (as with a vocabulary of 40001), whatever their stride.
// So such operands are copied into scratch memory and padded with zeros; such results are computed
// in scratch memory and copied from there.
//
// Epilogues. In forward, the product also adds the bias and applies ReLU, at almost no cost. In
// backward, cuBLASLt's epilogues are too slow. With the derivative of ReLU as epilogue, a product
// for dx took 556 us; the product alone took 175 us and a separate kernel 79 us. The bias gradient
// has a kernel of its own, because cuBLASLt's epilogue can neither accumulate nor write another
// type than the product's. On an H200 in bfloat16 the epilogue also costs more than that kernel,
// which reads dy again.

#include "common/check.h"
#include "common/column_sum.cuh"
#include "common/device.h"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "linear/matmul.h"
#include "linear/ops.h"

namespace lightseq {
namespace {

constexpr int kCopyRows = 8;
constexpr int kCopyColumns = 8;  // per lane

// out[r, c] = in[r, c], or 0 if `in` has no such element. Copies one number at a time, so that rows
// may have any alignment.
template <typename T>
__global__ void copy_padded_kernel(const T* __restrict__ in, int64_t in_rows, int64_t in_columns,
                                   int64_t in_stride, T* __restrict__ out, int64_t out_rows,
                                   int64_t out_columns, int64_t out_stride) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kCopyRows + threadIdx.y;
  if (row >= out_rows) return;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kCopyColumns * kWarp + threadIdx.x;
  T values[kCopyColumns];
#pragma unroll
  for (int i = 0; i < kCopyColumns; ++i) {
    const int64_t column = first + i * kWarp;
    values[i] = row < in_rows && column < in_columns ? in[row * in_stride + column] : T{0};
  }
#pragma unroll
  for (int i = 0; i < kCopyColumns; ++i) {
    const int64_t column = first + i * kWarp;
    if (column < out_columns) out[row * out_stride + column] = values[i];
  }
}

constexpr int kSumWarps = 8;
constexpr int kSumBlocks = 4;  // resident blocks per SM
constexpr int kSumRows = 8;    // rows in flight per warp

// Each block sums `rows_per_block` rows of 32 vectors of columns; its warps split the rows. It
// writes its part of row blockIdx.y of partials [gridDim.y, outputs]; add_partials() adds the rows.
template <typename T>
__global__ void __launch_bounds__(kWarp* kSumWarps, kSumBlocks)
    linear_dbias_kernel(const T* __restrict__ dy, int64_t rows, int64_t columns, int64_t stride,
                        int64_t rows_per_block, float* __restrict__ partials, int64_t outputs) {
  constexpr int kVec = Vec<T>::kSize;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kWarp * kVec;
  const int64_t column = first_column + threadIdx.x * kVec;
  const int64_t begin = blockIdx.y * rows_per_block;
  const int64_t end = min(begin + rows_per_block, rows);
  float sums[kVec] = {};
  const auto add = [&](const Vec<T>& x) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) sums[i] += to_float(x.values[i]);
  };
  if (column < columns) {
    int64_t row = begin + threadIdx.y;
    for (; row + (kSumRows - 1) * kSumWarps < end; row += kSumRows * kSumWarps) {
      Vec<T> x[kSumRows];
#pragma unroll
      for (int i = 0; i < kSumRows; ++i) {
        x[i] = load_cg(dy + (row + i * kSumWarps) * stride + column);
      }
#pragma unroll
      for (int i = 0; i < kSumRows; ++i) add(x[i]);
    }
    for (; row < end; row += kSumWarps) add(load_cg(dy + row * stride + column));
  }
  __shared__ float of_warp[kSumWarps][kVec][kWarp];
#pragma unroll
  for (int i = 0; i < kVec; ++i) of_warp[threadIdx.y][i][threadIdx.x] = sums[i];
  __syncthreads();
  const int mine = threadIdx.y * kWarp + threadIdx.x;
  if (mine >= kWarp * kVec || first_column + mine >= outputs) return;
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kSumWarps; ++warp) sum += of_warp[warp][mine % kVec][mine / kVec];
  partials[blockIdx.y * outputs + first_column + mine] = sum;
}

// ---- operands that cuBLASLt can read fast ----

constexpr int64_t kPadding = 64;  // numbers; rows of scratch memory fill whole cache lines

int64_t rounded_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// The padded width of operands with rows of n numbers.
int64_t width(int64_t n) { return n % 8 == 0 ? n : rounded_up(n, kPadding); }

bool fits(const Matrix& x, int64_t rows, int64_t columns) {
  return x.rows == rows && x.columns == columns && x.stride >= columns &&
         reinterpret_cast<uintptr_t>(x.data) % kRowAlignment == 0 &&
         x.bytes(x.stride) % kRowAlignment == 0;
}

Matrix scratch_for(const Matrix& x, int64_t rows, int64_t columns) {
  Matrix scratch(allocate(x.owner, {rows, rounded_up(columns, kPadding)}, x.type));
  scratch.columns = columns;
  return scratch;
}

void copy_padded(const Matrix& in, const Matrix& out) {
  const dim3 grid(blocks_for(out.rows, kCopyRows), blocks_for(out.columns, kCopyColumns * kWarp));
  const auto start = [&](auto zero) {
    using T = decltype(zero);
    launch({.op = "copy_padded", .grid = grid, .block = dim3(kWarp, kCopyRows)},
           copy_padded_kernel<T>, static_cast<const T*>(in.data), in.rows, in.columns, in.stride,
           static_cast<T*>(out.data), out.rows, out.columns, out.stride);
  };
  in.bytes(1) == 4 ? start(uint32_t{}) : start(uint16_t{});
}

// x itself if it has this size and alignment, otherwise a padded copy.
Matrix padded(const Matrix& x, int64_t rows, int64_t columns) {
  if (fits(x, rows, columns)) return x;
  Matrix copy = scratch_for(x, rows, columns);
  copy_padded(x, copy);
  return copy;
}

// Multiplies padded operands, whose result is [rows, columns], into p.out, which may be smaller.
void multiply_padded(Product p, int64_t rows, int64_t columns) {
  if (fits(p.out, rows, columns)) return multiply(p);
  const Matrix out = p.out;
  p.out = p.accumulate ? padded(out, rows, columns) : scratch_for(out, rows, columns);
  multiply(p);
  copy_padded(p.out, out);
}

void add_dbias(const Matrix& dy, const Gradient& dbias, int64_t outputs, bool accumulate) {
  const int64_t block_columns = kWarp * kVecBytes / dy.bytes(1);
  const int64_t across = blocks_for(dy.columns, block_columns);
  const int64_t wave = resident_blocks(dy.owner.get_device(), kSumBlocks);
  const int64_t rows_per_block = std::max<int64_t>(kSumWarps, blocks_for(dy.rows * across, wave));
  const int64_t blocks = blocks_for(dy.rows, rows_per_block);
  const Tensor partials = allocate(dy.owner, {blocks, 1, outputs}, ScalarType::Float);
  dispatch_float(dy.type, "linear_bwd: dy", [&](auto zero) {
    using T = decltype(zero);
    launch({.op = "linear_dbias", .grid = dim3(across, blocks), .block = dim3(kWarp, kSumWarps)},
           linear_dbias_kernel<T>, static_cast<const T*>(dy.data), dy.rows, dy.columns, dy.stride,
           rows_per_block, partials.mutable_data_ptr<float>(), outputs);
  });
  add_partials(partials, {{dbias}}, accumulate);
}

void check_operands(const char* op, const Tensor& x, const Tensor& weight) {
  require(x.scalar_type() != ScalarType::Double, op,
          ": x must be float32, float16 or bfloat16 on a GPU");
  require(weight.numel() > 0, op, ": weight must not be empty");
}

Tensor linear_fwd_op(std::optional<Tensor> x_values, std::optional<Tensor> x_transpose,
                     std::optional<Tensor> x_scale, std::optional<Tensor> weight_values,
                     std::optional<Tensor> weight_transpose, std::optional<Tensor> weight_scale,
                     const std::optional<Tensor>& bias) {
  const Operand x{x_values, x_transpose, x_scale};
  const Operand weight{weight_values, weight_transpose, weight_scale};
  return x.is_quantised() ? fp8_linear_fwd(x, weight, bias)
                          : linear_fwd(*x.values, *weight.values, bias);
}

Tensor linear_bwd_op(std::optional<Tensor> dy_values, std::optional<Tensor> dy_transpose,
                     std::optional<Tensor> dy_scale, std::optional<Tensor> x_values,
                     std::optional<Tensor> x_transpose, std::optional<Tensor> x_scale,
                     std::optional<Tensor> weight_values, std::optional<Tensor> weight_transpose,
                     std::optional<Tensor> weight_scale, std::optional<Tensor> dweight,
                     std::optional<Tensor> dbias, std::optional<Tensor> onto, bool accumulate,
                     bool need_dx) {
  const Operand dy{dy_values, dy_transpose, dy_scale}, x{x_values, x_transpose, x_scale};
  const Operand weight{weight_values, weight_transpose, weight_scale};
  return x.is_quantised() ? fp8_linear_bwd(dy, x, weight, dweight, onto, accumulate, need_dx)
                          : linear_bwd(*dy.values, *x.values, *weight.values, dweight, dbias, onto,
                                       accumulate, need_dx);
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("linear_fwd", TORCH_BOX(&linear_fwd_op));
  m.impl("linear_bwd", TORCH_BOX(&linear_bwd_op));
}

}  // namespace

// x [T, K], weight [N, K], bias [N] or none -> y [T, N]
Tensor linear_fwd(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                  Activation activation) {
  constexpr const char* kOp = "linear_fwd";
  check_operands(kOp, x, weight);
  require(!bias || bias->is_contiguous(), kOp, ": bias must be contiguous");
  const int64_t tokens = x.size(0);
  Tensor y = allocate(x, {tokens, weight.size(0)});
  if (tokens == 0) return y;
  const DeviceGuard guard(x.get_device());

  const int64_t k = width(weight.size(1));
  const int64_t n = width(weight.size(0));
  Product product{.op = kOp,
                  .out = Matrix(y),
                  .a = padded(Matrix(x), tokens, k),
                  .b = padded(Matrix(weight), n, k),
                  .transpose_b = true,
                  .activation = activation};
  std::optional<Matrix> added;
  if (bias) {
    added = padded(Matrix(*bias), 1, n);
    product.bias = added->data;
  }
  multiply_padded(product, tokens, n);
  return y;
}

// dy [T, N], x [T, K], weight [N, K] -> dx [T, K] (empty unless need_dx). Writes dweight [N, K] and
// dbias [N]: overwrites or accumulates. If onto [T, K] is given, adds dx to it.
Tensor linear_bwd(const Tensor& dy, const Tensor& x, const Tensor& weight,
                  std::optional<Tensor> dweight, std::optional<Tensor> dbias,
                  std::optional<Tensor> onto, bool accumulate, bool need_dx) {
  constexpr const char* kOp = "linear_bwd";
  check_operands(kOp, x, weight);
  if (dweight) {
    const ScalarType type = dweight->scalar_type();
    require(type == x.scalar_type() || type == ScalarType::Float, kOp,
            ": dweight must have x's dtype or be float32 on a GPU");
    require(dweight->size(0) == 1 || dweight->stride(0) >= dweight->size(1), kOp,
            ": rows of dweight must not overlap");
  }
  const Gradient bias = gradient_of(kOp, "dbias", dbias);
  const int64_t tokens = x.size(0);
  Tensor dx = need_dx ? allocate(x, {tokens, x.size(1)}) : allocate(x, {0});
  const DeviceGuard guard(x.get_device());
  if (tokens == 0) {
    if (dweight && !accumulate) torch::stable::zero_(*dweight);
    if (dbias && !accumulate) torch::stable::zero_(*dbias);
    return dx;
  }

  const int64_t k = width(weight.size(1));
  const int64_t n = width(weight.size(0));
  const Matrix grad = padded(Matrix(dy), tokens, n);
  if (dbias) add_dbias(grad, bias, dbias->size(0), accumulate);
  if (dweight) {
    const Product product{.op = kOp,
                          .out = Matrix(*dweight),
                          .a = grad,
                          .b = padded(Matrix(x), tokens, k),
                          .transpose_a = true,
                          .accumulate = accumulate};
    multiply_padded(product, n, k);
  }
  if (need_dx || onto) {
    const Product product{.op = kOp,
                          .out = Matrix(onto ? *onto : dx),
                          .a = grad,
                          .b = padded(Matrix(weight), n, k),
                          .accumulate = onto.has_value()};
    multiply_padded(product, tokens, k);
  }
  return dx;
}

}  // namespace lightseq
