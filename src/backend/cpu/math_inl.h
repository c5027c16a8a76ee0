// Elementary functions on Vec, in arithmetic that is the same on every path. Included after one simd_*.h.
#pragma once

// Of the checks that are off here, one does not see that an unnamed namespace gives each source file its own
// definitions, and the other that indices of a tile and its row sizes are small: no product of two ints gets near 2^31.
// NOLINTBEGIN(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result)
namespace nfp {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();

// e^x within 2 units in the last place (polynomial: Cephes expf); 0 below -87 and infinity above 88.
// NaN gives a large finite number: max and min drop it. Callers see NaN by other ways (x itself, a sum).
inline Vec exp_of(Vec x) {
  const Vec low = splat(-87.0f), high = splat(88.0f);
  const Vec c = min(max(x, low), high);
  const Vec n = round_even(mul(c, splat(1.44269504088896341f)));
  Vec r = fma(n, splat(-0.693359375f), c);
  r = fma(n, splat(2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), splat(1.0f));
  Vec y = times_exp2(p, n);
  y = if_less(x, low, zero(), y);
  y = if_less(high, x, splat(__builtin_inff()), y);
  return y;
}

inline Vec silu(Vec x) { return div(x, add(splat(1.0f), exp_of(sub(zero(), x)))); }

// 1 - 2 / (e^2x + 1): absolute error below 2^-22, all that its users need.
inline Vec tanh_of(Vec x) {
  const Vec one = splat(1.0f);
  return sub(one, div(splat(2.0f), add(exp_of(add(x, x)), one)));
}

inline Vec gelu_tanh(Vec x) {
  const Vec cube = mul(mul(x, x), x);
  const Vec inner = mul(splat(0.7978845608028654f), fma(splat(0.044715f), cube, x));
  return mul(mul(splat(0.5f), x), add(splat(1.0f), tanh_of(inner)));
}

}  // namespace
}  // namespace nfp
// NOLINTEND(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result)
