"""The experts of mixtures on the GPU against torch in FP64. Skips where there is no torch or no Hopper GPU."""

import unittest

from test_op import HAVE_GPU, e4m3, normal

if HAVE_GPU:
    import torch
    from nestedfp import _library
    from nestedfp.vllm import experts, op


def draw_routes(rows, top, count, seed, favoured=0):
    """ids [rows, top] without repetitions in a row, and weights; `favoured` experts are in every row."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, count, generator=generator)
    scores[:, :favoured] += 1
    ids = scores.topk(top, dim=1).indices.to(torch.int32)
    return ids.cuda(), torch.rand(rows, top, generator=generator).cuda()


@unittest.skipUnless(HAVE_GPU, "needs torch and a Hopper GPU")
class Experts(unittest.TestCase):
    def setUp(self):
        op.Step.forced = None

    def tearDown(self):
        op.Step.forced = None

    def weights(self, count, hidden, inter, dtype, dense=()):
        out = []
        for seed, shape in enumerate(((count, 2 * inter, hidden), (count, hidden, inter))):
            weight = normal(*shape, sigma=0.05, dtype=dtype, seed=seed)
            if dtype is torch.bfloat16:
                weight[weight.abs() < 2.0**-10] = 0  # nesting rounds BF16's smallest numbers
            elif hidden > 64:
                weight[:, ::7] *= 64  # rows with an exponent
            for e in dense:
                weight[e, 3, 0], weight[e, 3, 1] = 6.0, 2.0**-24
            out.append(weight)
        return out

    def mixture(self, w13, w2):
        gate_up, down = experts.nest(w13, gated=True), experts.nest(w2, gated=False)
        return experts.Mixture(gate_up, down, _library.SILU)

    def uppers(self, weight, stack, gated):
        """What FP8 steps multiply with: E4M3 numbers, of experts that do not nest the weights themselves."""
        out = weight.double()
        scale = stack.scale if stack.scale.numel() else torch.ones(weight.shape[:2], device="cuda")
        if gated and stack.scale.numel():
            scale = torch.stack([op.in_order(row[None])[0] for row in scale])
        for e in range(weight.shape[0]):
            if e not in stack.dense:
                s = scale[e][:, None]
                out[e] = e4m3(weight[e].float() / s * 256) / 256 * s.double()
        return out

    def rounds(self, rows, top, stacks):
        """Whether FP8 rounds activations too (kRoundedRows, src/backend/cuda/experts/grouped.h)."""
        return rows * top >= 32 * stacks[0].experts and not any(stack.dense for stack in stacks)

    def to_e4m3(self, x):
        scale = x.float().abs().amax(1, keepdim=True) / 448
        return e4m3(x.float() / scale.clamp(min=1e-30)) * scale.double()

    def reference(self, x, weights, ids, w13, w2, present=None, rounded=False):
        """FP64 throughout but for the activation, which is rounded to x's type as it is stored; rounded: it and x to
        E4M3."""
        low = self.to_e4m3 if rounded else torch.Tensor.double
        y = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
        inter = w2.shape[2]
        for e in range(w13.shape[0]):
            row, choice = (ids == (e if present is None else present[e])).nonzero(as_tuple=True)
            if row.numel() == 0:
                continue
            both = low(x[row]) @ w13[e].double().t()
            gate, up = both[:, :inter], both[:, inter:]
            h = (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)
            y.index_add_(0, row, (low(h) @ w2[e].double().t()).to(x.dtype).double() * weights[row, choice].double()[:, None])
        return y

    def assert_close(self, got, want, dtype, what, rounded=False):
        # Each of the three roundings to 11 (8) bits is a last place of something that is summed over `inter`. Where
        # activations are rounded to E4M3 (3 bits), some that lie between two codes go the other way.
        limit = (1.5e-3 if dtype is torch.float16 else 1.2e-2) + (8e-3 if rounded else 0)
        error = float((got.double() - want).norm() / want.norm().clamp(min=1e-9))
        self.assertLess(error, limit, what)

    def test_both_precisions(self):
        for dtype in (torch.float16, torch.bfloat16):
            for count, top, hidden, inter, dense in ((8, 2, 128, 96, ()), (5, 5, 64, 8, (2,)), (60, 4, 264, 200, (0, 59)),
                                                     (128, 8, 256, 128, ())):
                dense = () if dtype is torch.bfloat16 else dense  # all of whose rows have exponents
                w13, w2 = self.weights(count, hidden, inter, dtype, dense)
                mixture = self.mixture(w13, w2)
                self.assertEqual([set(stack.dense) for stack in mixture.stacks], [set(dense)] * 2)
                low13, low2 = (self.uppers(w, s, g) for w, s, g in zip((w13, w2), mixture.stacks, (True, False)))
                for rows in (1, 7, 33, 300):
                    x = normal(rows, hidden, dtype=dtype, seed=rows)
                    for favoured in (0, 1):
                        ids, weights = draw_routes(rows, top, count, rows, favoured)
                        for precision, a, b in ((_library.FP16, w13, w2), (_library.FP8, low13, low2)):
                            op.Step.forced = precision
                            got = mixture.run(x, weights, ids)
                            rounded = precision == _library.FP8 and self.rounds(rows, top, mixture.stacks)
                            self.assert_close(got, self.reference(x, weights, ids, a, b, rounded=rounded), dtype,
                                              (dtype, count, top, hidden, inter, rows, favoured, precision), rounded)

    def test_weights_come_back_bit_for_bit(self):
        for dtype in (torch.float16, torch.bfloat16):
            w13, _ = self.weights(4, 200, 72, dtype, (1,) if dtype is torch.float16 else ())
            stack = experts.nest(w13, gated=True)
            for e in range(4):
                back = op.in_order(stack.restore(e, dtype).t().contiguous()).t()
                self.assertTrue(torch.equal(back.contiguous().view(torch.int16), w13[e].view(torch.int16)), e)

    def test_slices_of_a_checkpoint(self):
        w13, w2 = (normal(6, n, k, sigma=0.05, seed=n) for n, k in ((2 * 72, 136), (136, 72)))
        stacks = []
        for weight, gated in ((w13, True), (w2, False)):
            upper = (weight.float() * 256).to(torch.float8_e4m3fn)
            lower = (weight.view(torch.int16) & 0xFF).to(torch.uint8)
            scale = torch.full((*weight.shape[:2], 1), 2.0**-8, device="cuda")
            stacks.append([experts.pack(upper, lower, scale, gated, free) for free in (False, True)])
            self.assertEqual(stacks[-1][0].scale.numel(), 0)
            nested = experts.nest(weight, gated)
            self.assertTrue(torch.equal(stacks[-1][0].bytes, nested.bytes))
        x, (ids, weights) = normal(9, 136), draw_routes(9, 3, 6, 2)
        op.Step.forced = _library.FP16
        one, other = (experts.Mixture(a, b, _library.SILU).run(x, weights, ids) for a, b in zip(*stacks))
        self.assertTrue(torch.equal(one, other))
        self.assert_close(one, self.reference(x, weights, ids, w13, w2), torch.float16, "pack")

    def test_parts_of_the_experts(self):
        """Expert parallelism: two halves' sums are the whole's; ids that nobody has count nothing."""
        w13, w2 = self.weights(10, 128, 64, torch.float16)
        x, (ids, weights) = normal(50, 128), draw_routes(50, 4, 10, 3)
        ids[7] = -1
        ids[8, 2] = 10
        op.Step.forced = _library.FP16
        total = torch.zeros(50, 128, dtype=torch.float64, device="cuda")
        for first, last in ((0, 3), (3, 10)):
            expert_map = torch.full((10,), -1, dtype=torch.int32, device="cuda")
            expert_map[first:last] = torch.arange(last - first, dtype=torch.int32, device="cuda")
            part = self.mixture(w13[first:last].contiguous(), w2[first:last].contiguous())
            got = part.run(x, weights, ids, expert_map)
            present = list(range(first, last))
            self.assert_close(got, self.reference(x, weights, ids, w13[first:last], w2[first:last], present), torch.float16,
                              (first, last))
            total += got.double()
        self.assertFalse(bool(total[7].any()))
        self.assert_close(total, self.reference(x, weights, ids, w13, w2), torch.float16, "halves")

    def test_graphs_replay_with_other_routes(self):
        w13, w2 = self.weights(16, 128, 64, torch.float16)
        mixture = self.mixture(w13, w2)
        x, (ids, weights) = normal(40, 128), draw_routes(40, 4, 16, 3)
        for precision in (_library.FP16, _library.FP8):
            op.Step.forced = precision
            mixture.run(x, weights, ids)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = mixture.run(x, weights, ids)
            for seed in range(5):
                ids.copy_(draw_routes(40, 4, 16, seed, favoured=seed % 3)[0])
                graph.replay()
                self.assertTrue(torch.equal(y, mixture.run(x, weights, ids)))

    def test_a_warm_up_gives_the_result_of_the_precision_in_force(self):
        w13, w2 = self.weights(16, 128, 64, torch.float16)
        mixture = self.mixture(w13, w2)
        x, (ids, weights) = normal(600, 128), draw_routes(600, 4, 16, 3)
        results = []
        for precision in (_library.FP16, _library.FP8):
            op.Step.forced = precision
            results.append(mixture.run(x, weights, ids))
            with op.Step.warm_up():
                self.assertEqual(len(op.Step.precisions(600)), 2)
                self.assertTrue(torch.equal(mixture.run(x, weights, ids), results[-1]))
        self.assertFalse(torch.equal(*results))

    def test_the_threshold_and_no_rows(self):
        w13, w2 = self.weights(4, 64, 64, torch.float16)
        mixture = self.mixture(w13, w2)
        x, (ids, weights) = normal(64, 64), draw_routes(64, 2, 4, 3)
        self.assertEqual(mixture.run(x[:0], weights[:0], ids[:0]).shape, (0, 64))
        results = {}
        for precision in (_library.FP16, _library.FP8):
            op.Step.forced = precision
            results[precision] = mixture.run(x, weights, ids)
        op.Step.forced = None
        op.Step.threshold = 63
        try:
            self.assertTrue(torch.equal(mixture.run(x, weights, ids), results[_library.FP8]))
            op.Step.threshold = 64
            self.assertTrue(torch.equal(mixture.run(x, weights, ids), results[_library.FP16]))
        finally:
            op.Step.threshold = 1024

    def test_stacks_of_a_given_form(self):
        """That of weights in whose place these come."""
        w13, _ = self.weights(4, 64, 64, torch.float16)
        plain = experts.nest(w13, True)
        self.assertEqual(plain.form(), experts.Form(False, frozenset()))
        given = experts.nest(w13, True, experts.Form(True, frozenset({1})))
        self.assertEqual(given.form(), experts.Form(True, frozenset({1})))
        for e in range(4):
            self.assertTrue(torch.equal(given.restore(e, torch.float16), plain.restore(e, torch.float16)))
        scaled, _ = self.weights(4, 128, 64, torch.float16)
        with self.assertRaisesRegex(ValueError, "exponents"):
            experts.nest(scaled, True, experts.Form(False, frozenset()))
        dense, _ = self.weights(4, 64, 64, torch.float16, dense=(2,))
        with self.assertRaisesRegex(ValueError, "expert 2 does not nest"):
            experts.nest(dense, True, experts.Form(True, frozenset({1})))

    def test_a_damaged_expert_is_named(self):
        w13, _ = self.weights(4, 64, 64, torch.float16)
        w13[2, 5, 7] = float("inf")
        with self.assertRaisesRegex(ValueError, "expert 2"):
            experts.nest(w13, gated=True)
        mixture = self.mixture(*self.weights(4, 64, 64, torch.float16))
        ids, weights = draw_routes(3, 2, 4, 1)
        with self.assertRaisesRegex(_library.NestedFPError, "top"):
            mixture.run(normal(3, 64), weights[:, :0], ids[:, :0])


if __name__ == "__main__":
    unittest.main(verbosity=1)
