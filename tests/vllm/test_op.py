"""nestedfp's op on the GPU against torch. Skips where there is no torch or no Hopper GPU."""

import ctypes
import importlib.util
import unittest

try:
    import torch

    HAVE_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
except ImportError:
    HAVE_GPU = False

if HAVE_GPU:
    from nestedfp import _library
    from nestedfp.vllm import op


def normal(*shape, sigma=1.0, dtype=None, seed=0):
    generator = torch.Generator(device="cuda")
    generator.manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator, device="cuda") * sigma).to(dtype or torch.float16)


def e4m3(values):
    return values.to(torch.float8_e4m3fn).double()


@unittest.skipUnless(HAVE_GPU, "needs torch and a Hopper GPU")
class Op(unittest.TestCase):
    def setUp(self):
        op.Step.forced = None

    def tearDown(self):
        op.Step.forced = None

    def nested(self, n, k, dtype, outliers=True):
        weight = normal(n, k, sigma=0.05, dtype=dtype)
        if dtype is torch.bfloat16:
            weight[weight.abs() < 2.0**-10] = 0  # nesting rounds BF16's smallest numbers
        if outliers and dtype is torch.float16:  # rows with an exponent (BF16's small weights would not survive one)
            weight[::7] *= 64
        return weight, op.nest(weight)

    def run_op(self, x, planes, bias=None):
        return torch.ops.nestedfp.linear(x, planes.upper, planes.lower, planes.scale, bias, planes.n, planes.k, planes.join)

    def test_weights_come_back_bit_for_bit(self):
        for dtype in (torch.float16, torch.bfloat16):
            for n, k in ((64, 128), (200, 328), (6144, 4096), (1, 8)):
                weight, planes = self.nested(n, k, dtype)
                self.assertTrue(torch.equal(op.restore(planes, dtype).view(torch.int16), weight.view(torch.int16)))

    def test_a_matrix_that_does_not_nest_says_so(self):
        weight = normal(64, 128, sigma=0.05)
        weight[3, 0], weight[3, 1] = 6.0, 2.0**-24
        with self.assertRaisesRegex(op.NotNested, "row 3"):
            op.nest(weight)
        weight[5, 7] = float("nan")
        with self.assertRaisesRegex(ValueError, "row 5|row 3"):
            op.nest(weight)

    def test_fp16_is_exact_up_to_the_order_of_sums(self):
        for dtype, limit in ((torch.float16, 6e-4), (torch.bfloat16, 5e-3)):
            for n, k in ((64, 128), (200, 328), (1024, 2048)):
                for outliers in (False, True):
                    weight, planes = self.nested(n, k, dtype, outliers)
                    bias = normal(n, dtype=dtype, seed=3)
                    for m in (1, 7, 33, 300):
                        x = normal(m, k, dtype=dtype, seed=m)
                        for b in (None, bias):
                            op.Step.forced = _library.FP16
                            want = x.double() @ weight.double().t() + (0 if b is None else b.double())
                            got = self.run_op(x, planes, b).double()
                            self.assertLess(float((got - want).norm() / want.norm()), limit, (dtype, n, k, m))

    def test_fp8_multiplies_uppers_and_rounded_activations(self):
        for dtype, limit in ((torch.float16, 8e-3), (torch.bfloat16, 9e-3)):
            for n, k in ((64, 128), (200, 328), (1024, 2048)):
                weight, planes = self.nested(n, k, dtype)
                scale = planes.scale if planes.scale.numel() else torch.ones(n, device="cuda")
                uppers = e4m3((weight.float() / scale[:, None] * 256)) / 256 * scale.double()[:, None]
                for m in (1, 7, 33, 300):
                    x = normal(m, k, dtype=dtype, seed=m)
                    token = (x.float().abs().amax(1, keepdim=True) / 448)
                    rounded = e4m3(x.float() / token) * token.double()
                    want = rounded @ uppers.t()
                    op.Step.forced = _library.FP8
                    got = self.run_op(x, planes).double()
                    self.assertLess(float((got - want).norm() / want.norm()), limit, (dtype, n, k, m))

    @unittest.skipUnless(HAVE_GPU and torch.cuda.device_count() > 1, "needs a second GPU")
    def test_tensors_on_another_gpu_than_the_current_one(self):
        weight, planes = self.nested(256, 512, torch.float16)
        x, bias = normal(33, 512), normal(256, seed=3)
        there = op.nest(weight.to("cuda:1"))
        for precision in (_library.FP16, _library.FP8):
            op.Step.forced = precision
            here = self.run_op(x, planes, bias)
            got = self.run_op(x.to("cuda:1"), there, bias.to("cuda:1"))
            self.assertEqual((got.get_device(), torch.cuda.current_device()), (1, 0))
            self.assertTrue(torch.equal(got.cpu(), here.cpu()))
            with self.assertRaisesRegex(RuntimeError, "must be on the activations' device, cuda:0"):
                self.run_op(x, there)

    def test_the_threshold_is_inside(self):
        _, planes = self.nested(256, 512, torch.float16)
        x = normal(64, 512)
        results = {}
        for precision in (_library.FP16, _library.FP8):
            op.Step.forced = precision
            results[precision] = [self.run_op(x[:m], planes) for m in (32, 33)]
        op.Step.forced = None
        op.Step.threshold = 32
        try:
            self.assertTrue(torch.equal(self.run_op(x[:32], planes), results[_library.FP16][0]))
            self.assertTrue(torch.equal(self.run_op(x[:33], planes), results[_library.FP8][1]))
        finally:
            op.Step.threshold = 1024

    def test_a_bias_that_is_written_to_in_place(self):
        """Also by graphs, which hold what the op made of it."""
        weight, planes = self.nested(256, 512, torch.float16)
        bias, other = normal(256, seed=3), normal(256, seed=4)
        x = normal(33, 512)
        op.Step.forced = _library.FP16
        with torch.inference_mode():  # vLLM's, outside of which its tensors may not be written to
            self.run_op(x, planes, bias)
            self.run_op(x, planes, other)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, y_other = self.run_op(x, planes, bias), self.run_op(x, planes, other)
        for i, refreshed in enumerate((bias, None)):
            for one in (bias, other):
                one.copy_(normal(256, seed=10 + i))
            op.refresh(refreshed)
            graph.replay()
            want = x.double() @ weight.double().t() + bias.double()
            for got in (y, self.run_op(x, planes, bias), *((y_other,) if refreshed is None else ())):
                self.assertLess(float((got.double() - want).norm() / want.norm()), 6e-4)

    def test_biases_that_begin_at_one_place(self):
        x, bias = normal(33, 512), normal(256, seed=3)
        op.Step.forced = _library.FP16
        for n in (64, 256, 64):
            weight, planes = self.nested(n, 512, torch.float16)
            want = x.double() @ weight.double().t() + bias[:n].double()
            y = self.run_op(x, planes, bias[:n])
            self.assertLess(float((y.double() - want).norm() / want.norm()), 6e-4)

    def test_a_workspace_that_was_thrown_away(self):
        weight, planes = self.nested(256, 4096, torch.float16)
        op.device(torch.cuda.current_device()).workspace.fill_(255)
        op.clear_workspaces()
        for m in (1, 33, 300):
            x = normal(m, 4096)
            op.Step.forced = _library.FP16
            want = x.double() @ weight.double().t()
            self.assertLess(float((self.run_op(x, planes).double() - want).norm() / want.norm()), 6e-4)

    def test_scales_of_a_given_form(self):
        weight, planes = self.nested(64, 128, torch.float16, outliers=False)
        kept = op.nest(weight, True)
        self.assertEqual((planes.scale.numel(), kept.scale.numel()), (0, 64))
        self.assertTrue(torch.equal(op.restore(kept, torch.float16), weight))
        x = normal(7, 128)
        for precision in (_library.FP16, _library.FP8):
            op.Step.forced = precision
            self.assertTrue(torch.equal(self.run_op(x, kept), self.run_op(x, planes)))
        with self.assertRaisesRegex(ValueError, "exponents"):
            op.nest(self.nested(64, 128, torch.float16)[0], False)

    def test_strided_and_misaligned_activations(self):
        weight, planes = self.nested(128, 264, torch.float16)
        wide = normal(40, 600)
        op.Step.forced = _library.FP16
        for x in (wide[:, 8:272], wide[:, 3:267], wide[::3, :264], wide[:, :528:2]):
            want = x.double() @ weight.double().t()
            got = self.run_op(x, planes).double()
            self.assertLess(float((got - want).norm() / want.norm()), 6e-4)

    def test_slices_of_a_checkpoint(self):
        weight = normal(256, 512, sigma=0.05)
        bits = weight.view(torch.int16)
        lower = (bits & 0xFF).to(torch.uint8)
        upper = (weight.float() * 256).to(torch.float8_e4m3fn).view(torch.uint8)
        scale = torch.full((256, 1), 2.0**-8, device="cuda")
        for rows, columns in ((slice(0, 128), slice(0, 512)), (slice(128, 256), slice(256, 512)), (slice(3, 77), slice(8, 264))):
            for free in (False, True):
                planes = op.pack(upper[rows, columns], lower[rows, columns], scale[rows], free)
                self.assertTrue(torch.equal(op.restore(planes, torch.float16), weight[rows, columns]))

    def test_graphs_hold_the_precision_of_their_capture(self):
        _, planes = self.nested(512, 1024, torch.float16)
        x = normal(16, 1024)
        graphs, eager = {}, {}
        for precision in (_library.FP16, _library.FP8):
            op.Step.forced = precision
            eager[precision] = self.run_op(x, planes).clone()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = self.run_op(x, planes)
            graphs[precision] = (graph, y)
        op.Step.forced = None
        for i in range(20):
            precision = i % 2
            graphs[precision][0].replay()
            self.assertTrue(torch.equal(graphs[precision][1], eager[precision]))

    def test_a_warm_up_runs_both_precisions(self):
        """All kernels of both, and the result of the one in force; counted in graphs."""
        n, k, m = 208, 328, 33
        _, planes = self.nested(n, k, torch.float16)
        x, residual, norm = normal(m, k), normal(m, k, seed=1), normal(k, seed=2)
        weight = (planes.upper, planes.lower, planes.scale)
        calls = {"linear": (x, *weight, None, n, k, planes.join), "swiglu": (x, *weight, n, k, planes.join),
                 "norm_linear": (x, residual, norm, 1e-5, *weight, None, n, k, planes.join, False)}

        def captured(name):
            call = getattr(torch.ops.nestedfp, name)
            return nodes_of(lambda: call(*calls[name]))

        def nodes_of(call):
            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph):
                made = call()
            nodes = ctypes.c_size_t()
            driver = ctypes.CDLL("libcuda.so.1")
            self.assertEqual(driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(nodes)), 0)
            graph.replay()
            torch.cuda.synchronize()
            return nodes.value, [made] if isinstance(made, torch.Tensor) else list(made)

        empty = nodes_of(x.clone)[0] - 1  # PyTorch's own, if there are any
        for name in calls:
            single = {}
            for precision in (_library.FP16, _library.FP8):
                op.Step.forced = precision
                single[precision] = captured(name)
            for precision, (_, wanted) in single.items():
                op.Step.forced = precision
                with op.Step.warm_up():
                    nodes, got = captured(name)
                self.assertEqual(nodes - empty, sum(count - empty for count, _ in single.values()), name)
                self.assertTrue(all(torch.equal(a, b) for a, b in zip(got, wanted)), (name, precision))
                self.assertEqual(captured(name)[0], single[precision][0], name)

    def test_swiglu_in_the_product(self):
        for dtype, limits in ((torch.float16, (1.5e-3, 1.2e-2)), (torch.bfloat16, (8e-3, 1.5e-2))):
            for n, k in ((32, 128), (208, 328), (2048, 1024)):
                weight = normal(n, k, sigma=0.05, dtype=dtype)
                weight[weight.abs() < 2.0**-10] = 0
                planes = op.nest(op.interleave(weight))
                for m in (1, 7, 33, 300):
                    x = normal(m, k, dtype=dtype, seed=m)
                    token = (x.float().abs().amax(1, keepdim=True) / 448)
                    rounded = e4m3(x.float() / token) * token.double()
                    uppers = e4m3(weight.float() * 256) / 256
                    for precision, a, w, limit in ((_library.FP16, x.double(), weight.double(), limits[0]),
                                                   (_library.FP8, rounded, uppers, limits[1])):
                        op.Step.forced = precision
                        gate, up = (a @ w.t()).split(n // 2, 1)
                        want = torch.nn.functional.silu(gate) * up
                        arguments = (x, planes.upper, planes.lower, planes.scale)
                        got = torch.ops.nestedfp.swiglu(*arguments, n, k, planes.join).double()
                        self.assertLess(float((got - want).norm() / want.norm()), limit, (dtype, precision, n, k, m))
                        whole = op.in_order(torch.ops.nestedfp.linear(*arguments, None, n, k, planes.join)).double()
                        want = torch.cat([gate, up], 1)
                        self.assertLess(float((whole - want).norm() / want.norm()), limit, (dtype, precision, n, k, m))

    def test_norm_before_the_product(self):
        for dtype, limits in ((torch.float16, (1e-3, 1e-2)), (torch.bfloat16, (8e-3, 1.3e-2))):
            for n, k in ((32, 128), (208, 328), (2048, 1024)):
                weight = normal(n, k, sigma=0.05, dtype=dtype)
                weight[weight.abs() < 2.0**-10] = 0
                plain, joined = op.nest(weight), op.nest(op.interleave(weight))
                bias = normal(n, dtype=dtype, seed=3)
                norm = normal(k, dtype=dtype, seed=5)
                for m in (1, 7, 33, 300):
                    x, residual = normal(m, k, dtype=dtype, seed=m), normal(m, k, dtype=dtype, seed=m + 1)
                    before = residual.clone()
                    h = (x.float() + residual.float()).to(dtype)
                    wide = h.double()
                    normed = wide / (wide.pow(2).mean(1, keepdim=True) + 1e-5).sqrt() * norm.double()
                    alone, sum_of = torch.ops.nestedfp.norm(x, residual, norm, 1e-5, False)
                    self.assertTrue(torch.equal(sum_of, h))
                    self.assertLess(float((alone.double() - normed).norm() / normed.norm()), limits[0], (dtype, k, m))
                    token = normed.abs().amax(1, keepdim=True) / 448
                    rounded = e4m3((normed / token).float()) * token
                    uppers = e4m3(weight.float() * 256) / 256
                    for precision, a, w, limit in ((_library.FP16, normed, weight.double(), limits[0]),
                                                   (_library.FP8, rounded, uppers, limits[1])):
                        op.Step.forced = precision
                        gate, up = (a @ w.t()).split(n // 2, 1)
                        wants = ((plain, bias, False, torch.cat([gate, up], 1) + bias.double()),
                                 (joined, None, True, torch.nn.functional.silu(gate) * up))
                        for planes, b, swiglu, want in wants:
                            got, sum_of = torch.ops.nestedfp.norm_linear(
                                x, residual, norm, 1e-5, planes.upper, planes.lower, planes.scale, b, n, k, planes.join, swiglu)
                            self.assertTrue(torch.equal(sum_of, h))
                            self.assertTrue(torch.equal(residual, before))
                            error = float((got.double() - want).norm() / want.norm())
                            self.assertLess(error, limit, (dtype, precision, n, k, m, swiglu))

    @unittest.skipUnless(HAVE_GPU and importlib.util.find_spec("vllm"), "needs vLLM")
    def test_inductor_s_kernels_wait_for_all_before_them(self):
        """What a kernel wrote is read two kernels later, with one of ours between that lets the next begin at once."""
        from nestedfp.vllm import overlap
        from torch._inductor.utils import run_and_get_code

        op.register()
        self.assertTrue(overlap.install())
        n = 1024
        weight, planes = self.nested(n, n, torch.float16, outliers=False)
        op.Step.forced = _library.FP16

        def gated(a, b):
            x = torch.nn.functional.silu(a) * 0.5
            gate = torch.sigmoid(b) + x
            y = torch.ops.nestedfp.linear(x, planes.upper, planes.lower, planes.scale, None, n, n, planes.join)
            return y * gate + b

        compiled = torch.compile(gated, options={overlap.OPTION: True}, dynamic=False)
        a, b = normal(64, n, seed=1), normal(64, n, seed=2)
        with torch.inference_mode():
            got, codes = run_and_get_code(compiled, a, b)
            kernels = [code for code in "".join(codes).split("@triton.jit")[1:] if "tl.load" in code]
            self.assertGreaterEqual(len(kernels), 2)
            for code in kernels:
                self.assertIn("gdc_launch_dependents", code)
                self.assertLess(code.index("gdc_wait"), code.index("tl.load"))
            for i in range(50):
                a, b = normal(64, n, seed=10 + i), normal(64, n, seed=100 + i)
                torch.cuda.synchronize()
                got, want = compiled(a, b).double(), gated(a, b).double()
                self.assertLess(float((got - want).norm() / want.norm()), 2e-3)

    def test_planes_take_no_more_memory_than_they_need(self):
        """With the allocator as vLLM sets it while it loads."""
        op.device(torch.cuda.current_device())
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:20")
        try:
            before, kept, needed = torch.cuda.memory_allocated(), [], 0
            for n, k in ((6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336)) * 2:
                weight = normal(n, k, sigma=0.05)
                kept.append(op.nest(weight))
                del weight
                needed += 2 * kept[-1].upper.numel()
            taken = torch.cuda.memory_allocated() - before
            self.assertLess(taken, 1.005 * needed)
        finally:
            torch._C._accelerator_setAllocatorSettings("max_split_size_mb:1048576")

    def test_no_rows(self):
        _, planes = self.nested(64, 128, torch.float16)
        self.assertEqual(tuple(self.run_op(torch.empty(0, 128, dtype=torch.float16, device="cuda"), planes).shape), (0, 64))

    def test_the_self_test_passes(self):
        op._tested.clear()
        for dtype in (torch.float16, torch.bfloat16):
            op._tested.clear()
            torch.set_default_dtype(dtype)  # as vLLM does while it loads
            try:
                op.self_test(torch.device("cuda", torch.cuda.current_device()), dtype)
            finally:
                torch.set_default_dtype(torch.float32)


if __name__ == "__main__":
    unittest.main(verbosity=1)
