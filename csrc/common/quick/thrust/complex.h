// Stands in for thrust's header of complex numbers in quick builds (scripts/build_cuda.py). Torch's
// headers include it and instantiate nothing of it. The compiler needs a quarter of its time for
// the headers that thrust's own includes.
#pragma once

namespace thrust {

template <typename T>
struct complex;

template <typename T>
complex<T> polar(T length, T angle);

}  // namespace thrust
