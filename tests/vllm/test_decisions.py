"""Decisions on random states: the policies against what docs/serving.md says of them, and what the latency targets are
decided by (targets.py) against definitions that remember everything. Needs neither vLLM nor a GPU."""

import math
import random
import unittest

from nestedfp import _library
from nestedfp._library import FP8, FP16
from nestedfp.vllm.policy import Policy, precision_of_step
from nestedfp.vllm.settings import Settings
from nestedfp.vllm.targets import Clock, StepTimes, Target, Wanted


class Policies(unittest.TestCase):
    def policy(self, rng):
        """One at random, and what it decides: of the tokens of a step, and its number."""
        kind = rng.choice(["fp16", "fp8", "fp8-w8a8", "threshold", "alternate"])
        if kind == "fp16":
            return kind, lambda tokens, index: FP16
        if kind == "threshold":
            limit = rng.choice([0, 1, rng.randrange(1, 200), rng.randrange(1, 20000)])
            return f"threshold:{limit}", lambda tokens, index: FP8 if tokens > limit else FP16
        if kind == "alternate":
            steps = rng.randrange(1, 9)
            return f"alternate:{steps}", lambda tokens, index: (FP16, FP8)[(index // steps) % 2]
        return kind, lambda tokens, index: FP8

    def test_decisions_are_the_libraries(self):
        rng = random.Random(3)
        kinds = set()
        for _ in range(200):
            text, decide = self.policy(rng)
            kinds.add(text.partition(":")[0])
            settings = Settings.parse({"nestedfp": {"policy": text}})
            policy = Policy(settings.policy)
            for _ in range(100):
                tokens = rng.choice([1, rng.randrange(1, 128), rng.randrange(1, 20000)])
                index = rng.choice([rng.randrange(20), rng.randrange(1 << 40)])
                got = policy.choose(tokens, rng.randrange(tokens + 1), rng.randrange(300), rng.randrange(300),
                                    rng.random(), index)
                self.assertEqual(got, decide(tokens, index), (text, tokens, index))
                if settings.threshold() is not None:  # what the op compares with, without a scheduler of ours
                    self.assertEqual(got, FP8 if tokens > settings.threshold() else FP16, (text, tokens))
        self.assertEqual(kinds, {"fp16", "fp8", "fp8-w8a8", "threshold", "alternate"})
        with self.assertRaisesRegex(_library.NestedFPError, "threshold:TOKENS"):
            Policy("now and then")

    def test_what_requests_allow(self):
        rng = random.Random(4)
        for _ in range(2000):
            wanted = rng.choice((FP16, FP8))
            tiers = [rng.choice(("auto", "fast", "exact", "fast")) for _ in range(rng.randrange(6))]
            expected = FP16 if tiers.count("exact") else FP8 if tiers and tiers.count("fast") == len(tiers) else wanted
            self.assertEqual(precision_of_step(wanted, tiers), expected, tiers)


class Steps:
    """All steps that ever were, and when; what a Clock knows of them it must tell as this does."""

    def __init__(self, weight):
        self.weight = weight
        self.all = []  # [number, precision, tokens, scheduled, ended or None, seconds]
        self.ends = [0.0]

    def mean(self, precision, tokens):
        """Of the steps that ended whose tokens have as many bits, or as near a number of them as there is, fewer first;
        each newer one counts `weight` of what all older ones do together. At most twice that of FP8, of as many bits."""
        bits, found = math.floor(math.log2(tokens)), self.mean_of_precision(precision, tokens)
        if found is None or all(step[4] is None or step[1] != FP8 or math.floor(math.log2(step[2])) != bits
                                for step in self.all):
            return found
        return min(found, 2 * self.mean_of_precision(FP8, tokens))

    def mean_of_precision(self, precision, tokens):
        ended = sorted((step for step in self.all if step[4] is not None and step[1] == precision), key=lambda step: step[4])
        if not ended:
            return None
        bits = {math.floor(math.log2(step[2])) for step in ended}
        wanted = math.floor(math.log2(tokens))
        nearest = sorted(bits, key=lambda size: (abs(size - wanted), size))[0]
        seconds = [step[5] for step in ended if math.floor(math.log2(step[2])) == nearest]
        shares = [self.weight * (1 - self.weight) ** (len(seconds) - 1 - i) for i in range(len(seconds))]
        shares[0] = (1 - self.weight) ** (len(seconds) - 1)
        return sum(share * second for share, second in zip(shares, seconds))

    def under_way(self):
        newest_ended = max((step[0] for step in self.all if step[4] is not None), default=0)
        return [step for step in self.all if step[0] > newest_ended]

    def starts(self, now):
        """Each step begins once it was scheduled and the one before it is over."""
        free = self.ends[-1]
        under_way = self.under_way()
        for _, precision, tokens, scheduled, _, _ in under_way:
            free = max(free, scheduled) + (self.mean(precision, tokens) or 0.0)
        return max(now, free) if under_way else now


class RandomTargets(unittest.TestCase):
    def test_the_clock(self):
        for seed in range(30):
            rng = random.Random(seed)
            clock, steps, now = Clock(), Steps(0.2), 100.0
            for _ in range(120):
                now += rng.choice([0.0, rng.random() * 0.02])
                under_way = steps.under_way()
                if len(under_way) < 3 and rng.random() < 0.6:
                    precision, tokens = rng.choice((FP16, FP8)), rng.choice([1, rng.randrange(1, 64), rng.randrange(1, 9000)])
                    number = clock.scheduled(precision, tokens, now)
                    self.assertEqual(number, len(steps.all) + 1)
                    steps.all.append([number, precision, tokens, now, None, None])
                elif under_way:
                    step = under_way[0] if rng.random() < 0.9 else rng.choice(under_way)  # those before it were dropped
                    seconds = now - max(step[3], steps.ends[-1])
                    got = clock.ended(step[0], now)
                    self.assertEqual(got[0], step[1])
                    self.assertAlmostEqual(got[1], seconds)
                    step[4], step[5] = now, seconds
                    steps.ends.append(now)
                    self.assertIsNone(clock.ended(step[0], now))  # once
                self.assertAlmostEqual(clock.starts(now), steps.starts(now))
                self.check_late(rng, clock, steps, now)

    def check_late(self, rng, clock, steps, now):
        tokens = rng.randrange(1, 4000)
        wanted, late = [], False
        for _ in range(rng.randrange(4)):
            target, history = self.target(rng, now)
            one = Wanted(target, rng.randrange(1, 4), rng.randrange(3))
            wanted.append(one)
            due = self.due(target, history, one.in_flight)
            takes = one.steps * (steps.mean(FP16, tokens) or 0.0)
            if due is not None and abs(steps.starts(now) + takes - due) < 1e-9:
                return  # a tie, which rounding decides
            late = late or (due is not None and steps.starts(now) + takes > due)
        self.assertEqual(clock.late(wanted, tokens, now), late)

    def target(self, rng, now):
        """And when each of its tokens came."""
        arrival = now - rng.random() * 0.2
        target = Target(arrival, *(rng.choice([None, rng.random() * 0.3]) for _ in range(2)))
        history, at = [], arrival
        for _ in range(rng.randrange(4)):
            at += rng.random() * 0.1
            count = rng.choice([1, 1, 3])
            target.came(count, at)
            history += [at] * count
        return target, history

    def due(self, target, history, in_flight):
        """Of the token behind those that came and those under way. A first token that is under way counts as in time."""
        index = len(history) + in_flight
        if index == 0:
            return None if target.ttft_s is None else target.arrival_s + target.ttft_s
        if target.tpot_s is None or (not history and target.ttft_s is None):
            return None
        first = history[0] if history else target.arrival_s + target.ttft_s
        return first + index * target.tpot_s

    def test_when_tokens_are_due_and_whether_targets_were_kept(self):
        rng = random.Random(6)
        answers = set()
        for _ in range(3000):
            target, history = self.target(rng, 100.0)
            for in_flight in range(3):
                expected = self.due(target, history, in_flight)
                got = target.due(in_flight)
                self.assertEqual(got is None, expected is None)
                if expected is not None:
                    self.assertAlmostEqual(got, expected)
            gaps = [b - a for a, b in zip(history, history[1:])]
            kept = bool(history) and (target.ttft_s is None or history[0] - target.arrival_s <= target.ttft_s)
            kept = kept and (target.tpot_s is None or not gaps or sum(gaps) / len(gaps) <= target.tpot_s)
            self.assertEqual(target.kept(), kept)
            answers.add(kept)
        self.assertEqual(answers, {True, False})

    def test_step_times(self):
        rng = random.Random(7)
        for _ in range(50):
            weight = rng.choice([0.1, 0.2, 0.5])
            times, steps = StepTimes(weight), Steps(weight)
            for i in range(rng.randrange(1, 40)):
                precision, tokens, seconds = rng.choice((FP16, FP8)), rng.randrange(1, 9000), rng.random()
                times.observe(precision, tokens, seconds)
                steps.all.append([i, precision, tokens, 0.0, float(i), seconds])
                for precision in (FP16, FP8):
                    asked = rng.randrange(1, 9000)
                    expected, got = steps.mean(precision, asked), times.expected(precision, asked)
                    self.assertEqual(got is None, expected is None)
                    if expected is not None:
                        self.assertAlmostEqual(got, expected)


if __name__ == "__main__":
    unittest.main(verbosity=1)
