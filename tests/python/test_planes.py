"""nestedfp.nest and join on NumPy arrays (and torch tensors where torch is there)."""

import os
import unittest
from pathlib import Path
from unittest.mock import patch

import nestedfp
import numpy as np
from nestedfp import _library

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

try:
    import torch
except ImportError:
    torch = None


def bits(array):
    return np.ascontiguousarray(array).view(np.uint16)


class Library(unittest.TestCase):
    def test_the_folder_that_one_stands_in(self):
        file = Path(_library.find("libnestedfp.so"))
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(file.parent)
        with patch.dict(os.environ, {"NESTEDFP_LIBRARY_DIR": "."}):
            self.assertEqual(_library.library.__wrapped__().nfp_abi_version(), _library.ABI_VERSION)


class PlanesOfArrays(unittest.TestCase):
    def weights(self, rows=37, columns=129, seed=0):
        rng = np.random.default_rng(seed)
        weight = (rng.standard_normal((rows, columns)) * 0.3).astype(np.float16)
        weight[3] *= np.float16(8)  # beyond 1.75: a row exponent
        weight[5, :4] = [0.0, -0.0, 1.75, -1.75]
        return weight

    def test_every_number_up_to_1_75(self):
        pattern = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
        weight = pattern[np.abs(pattern) <= 1.75].reshape(2, -1)
        self.assertEqual(weight.size, 32258)
        planes = nestedfp.nest(weight)
        self.assertTrue((planes.exponents == 0).all())
        np.testing.assert_array_equal(bits(nestedfp.join(planes)), bits(weight))
        np.testing.assert_array_equal(planes.lower, bits(weight) & 0xFF)

    def test_bit_for_bit_with_row_exponents_and_threads(self):
        weight = self.weights()
        for threads in (1, 3):
            planes = nestedfp.nest(weight, threads=threads)
            self.assertEqual((planes.shape, planes.dtype, planes.inexact), (weight.shape, "float16", 0))
            self.assertGreater(planes.exponents[3], 0)
            np.testing.assert_array_equal(bits(nestedfp.join(planes, threads=threads)), bits(weight))

    def test_the_upper_byte_is_the_nearest_e4m3(self):
        weight = self.weights()
        planes = nestedfp.nest(weight)
        scale = np.exp2(planes.exponents.astype(np.float64) - 8)[:, None]
        error = np.abs(planes.fp8() - weight.astype(np.float64))
        # Half a unit of E4M3: 2^-4 of a normal number, 2^-10 of the scale below.
        self.assertTrue((error <= np.maximum(np.abs(weight.astype(np.float64)) * 2.0**-4, scale * 2.0**-10)).all())

    def test_slices_and_strides(self):
        weight = self.weights(64, 256)
        for part in (weight[::2], weight[:, ::3], weight.T):
            np.testing.assert_array_equal(bits(nestedfp.join(nestedfp.nest(part))), bits(part))

    def test_the_other_order_of_bytes(self):
        weight = self.weights()
        swapped = weight.astype(weight.dtype.newbyteorder())
        np.testing.assert_array_equal(nestedfp.nest(swapped).upper, nestedfp.nest(weight).upper)
        np.testing.assert_array_equal(bits(nestedfp.join(nestedfp.nest(swapped))), bits(weight))

    def test_what_cannot_be_nested_says_why(self):
        weight = self.weights()
        weight[7, :2] = [6.0, 2.0**-24]
        with self.assertRaisesRegex(nestedfp.NotNestable, "row 7"):
            nestedfp.nest(weight)
        weight[7, 0] = np.nan
        with self.assertRaisesRegex(ValueError, "row 7, column 0"):
            nestedfp.nest(weight)
        with self.assertRaises(TypeError):
            nestedfp.nest(np.zeros((2, 2), np.float32))
        with self.assertRaisesRegex(ValueError, "matrix"):
            nestedfp.nest(np.zeros(4, np.float16))
        with self.assertRaisesRegex(ValueError, r"shape \(\)"):
            nestedfp.nest(np.float16(1))

    def test_threads(self):
        planes = nestedfp.nest(self.weights())
        for call in (lambda threads: nestedfp.nest(self.weights(), threads), lambda threads: nestedfp.join(planes, threads)):
            for threads in (-1, 1025, 2**32 + 1):
                with self.assertRaisesRegex(ValueError, f"threads is {threads}"):
                    call(threads)
            for threads in (1.5, "2", None):
                with self.assertRaisesRegex(TypeError, "threads is a whole number"):
                    call(threads)

    def test_planes_that_do_not_belong_together(self):
        planes = nestedfp.nest(self.weights())
        other = nestedfp.Planes(planes.upper, planes.lower[:5], planes.exponents, "float16")
        with self.assertRaisesRegex(ValueError, "one matrix"):
            nestedfp.join(other)
        for upper in (planes.upper[0], planes.upper[None]):
            with self.assertRaisesRegex(ValueError, "one matrix"):
                nestedfp.join(nestedfp.Planes(upper, planes.lower, planes.exponents, "float16"))
        with self.assertRaisesRegex(ValueError, "not 'fp16'"):
            nestedfp.join(nestedfp.Planes(planes.upper, planes.lower, planes.exponents, "fp16"))
        with self.assertRaisesRegex(TypeError, "takes Planes.* not ndarray"):
            nestedfp.join(planes.upper)
        wide = nestedfp.Planes(planes.upper.astype(np.int64), planes.lower, planes.exponents, "float16")
        with self.assertRaisesRegex(TypeError, "uint8"):
            nestedfp.join(wide)

    @unittest.skipUnless(ml_dtypes, "ml_dtypes is not installed")
    def test_bf16_arrays(self):
        weight = self.weights().astype(ml_dtypes.bfloat16)
        planes = nestedfp.nest(weight)
        self.assertEqual((planes.dtype, planes.inexact), ("bfloat16", 0))
        np.testing.assert_array_equal(bits(nestedfp.join(planes)), bits(weight))

    def test_bf16_that_fp16_does_not_reach(self):
        weight = self.weights().astype(np.float32)
        weight[2, 1] = 1e30
        halves = (weight.view(np.uint32) >> 16).astype(np.uint16)
        with patch.object(nestedfp.planes, "_bits", return_value=(halves, "bfloat16")):
            with self.assertRaisesRegex(nestedfp.NotNestable, "row 2, column 1"):
                nestedfp.nest(halves)

    def test_an_error_that_is_not_the_matrixs(self):
        with patch.object(_library, "check", side_effect=nestedfp.NestedFPError(5, "out of memory")):
            with self.assertRaisesRegex(nestedfp.NestedFPError, "out of memory"):
                nestedfp.nest(self.weights())

    @unittest.skipUnless(torch, "torch is not installed")
    def test_torch(self):
        for dtype in (torch.float16, torch.bfloat16):
            weight = torch.randn(33, 65).mul(0.2).to(dtype)
            planes = nestedfp.nest(weight)
            self.assertEqual(planes.upper.dtype, torch.uint8)
            if planes.inexact == 0:
                self.assertTrue(torch.equal(nestedfp.join(planes), weight))


if __name__ == "__main__":
    unittest.main()
