#!/usr/bin/env python3
"""Fits the model of src/backend/cuda/gemm/plan/predict.h to times that gemm_grid --random-m SEED,COUNT --log-tried wrote.

    bench/fit_gemm_model.py src/backend/cuda/gemm/plan/choices_h200.json bench/results/gemm-h200-fit.jsonl [--tuned FILE...] [--search SECONDS]
        [--tiles MODE:TILE,TILE... | --joins | --steps FILE... [--keep MODE:TILE,TILE...]]

Replaces "models" in the first file, of the modes that were timed, from where they stand, and prints how well each mode is
fitted. From the files after --tuned (gemm_grid --tokens 1,8,16,24,32,40,48,64 --log-tried), whose times are fitted to as well, the
fastest that was tried becomes the choice for that many tokens; choices for more tokens go, where the mode has a model. The quantities are positive, so their logarithms are fitted (Levenberg-Marquardt, Huber weights) to the logarithms
of the times. Every cell (n, k, m) has an offset of its own, drawn towards 0: a clock that all its candidates shared.
--search goes on from there, so many seconds a mode: one to three quantities at a time are moved at random, and kept where what is chosen
comes closer to the fastest that was tried (a softened choice, so that near ties count by halves; numbers of tokens in six bands). Times are
fitted best by a model that is right where nothing is chosen; this fits the choice.
--tiles "e4m3:128x256 c2 b1,128x224 c2 b1": with --search, which moves the costs of these tiles alone, new to the mode's model or not, among the
tiles that it has; all else stays.
--joins: with --search, which moves what joining parts costs alone.
--steps: with --search, which moves tiles' costs alone, as few as pay, so that choices come closer to the fastest in the steps that
nestedfp tune --log-tried timed too. All files behind it are such. --keep: tiles whose costs stay.
Needs numpy.
"""
import collections
import json
import math
import multiprocessing
import pathlib
import re
import sys
import time

import numpy as np

SMS = 132
FIRST_GUESS = {"launch_us": 1.5, "memory_tb_s": 4.3, "l2_tb_s": 9.0, "tflops": 0.0, "exchange_us": 1.0, "exchange_us_kb": 0.02,
               "exchange_us_part": 0.2, "turn_us": 1.0, "split_us": 1.5, "split_us_kb": 0.02, "split_us_part": 0.2, "stream_us": 1.5,
               "stream_us_kb": 0.02, "reread": 1.0}
QUANTITIES = list(FIRST_GUESS)
JOINS = [key for key in QUANTITIES if key.startswith(("exchange", "split", "stream"))]
# What a pair of SMs loads is read off products of which some pairs have twice as much as others, and not fitted: 0.09 TB/s.
# FP16's choices at few tokens are worse with it (1.039 of the fastest's time in place of 1.031, shapes that were not fitted to).
PAIR_TB_S = {"e4m3": 0.09}
MODES = {"nested_f16 tried": "f16", "nested_e4m3 tried": "e4m3", "nested_e4m3_promoted tried": "e4m3-promoted", "nested_w8a16 tried": "w8a16"}
LEAST_SAMPLES = 6  # of a tile that enters the file
PLAN = pathlib.Path(__file__).resolve().parent.parent / "src/backend/cuda/gemm/plan"


def constant(file, name):
    """What the C++ code that reads the model has for a number."""
    found = re.search(rf"\b{name} = ([0-9.]+)[,;]", (PLAN / file).read_text())
    if not found:
        sys.exit(f"{PLAN / file} has no constant {name} any more; say here where it is now")
    return float(found[1])


TURN_US_KB = constant("predict.cc", "kTurnMicroseconds")
FINE_BUCKETS = int(constant("tuning_table.cc", "kFineBuckets"))
# How much faster stream-K must be predicted to be chosen, up to two tiles of tokens and beyond.
STREAM_MARGIN, WIDE_STREAM_MARGIN = constant("tuning_table.cc", "kStreamMargin"), constant("tuning_table.cc", "kWideStreamMargin")


def ceil_div(a, b):
    return -(-a // b)


def parse(config):
    size, cluster, blocks, *cut = config.split()
    rows, tokens = map(int, size.split("x"))
    kind, splits = re.match(r"([a-z]*)(\d*)", cut[0] if cut else "").groups()
    return rows, tokens, int(cluster[1:]), cluster[0] == "w", int(blocks[1:]), 0 if kind == "stream" else int(splits or 1), kind == "exchange"


def tile_of(config):
    """Its name, without the cut."""
    return " ".join(config.split()[:3])


def is_candidate(config, mode):
    """Whether for_each_candidate() of predict.h still has it: the widest tiles, and FP16's of three warpgroups, are not joined in global memory."""
    rows, tokens, _, _, _, splits, exchange = parse(config)
    return splits == 1 or exchange or (tokens <= 288 and (mode != "f16" or rows != 192))


def clusters_of(line):
    """How many clusters of 0, 1, 2... blocks are resident, one and two blocks an SM, from a file's first line."""
    if "clusters" in line:
        return line["clusters"]
    fours = line.get("clusters_of_4", 31)  # older files; the rest by rule of thumb
    one = [0, SMS, SMS // 2] + [fours // (size // 4) if size % 4 == 0 else fours * 4 * 7 // 8 // size for size in range(3, 9)]
    return [one, [2 * count for count in one]]


def busiest_pair(launched, blocks):  # as in predict.cc
    full, rest = divmod(launched, SMS * blocks)
    return full * 2 * blocks + (0 if rest == 0 else 1 if 2 * rest <= SMS else 2 if rest <= SMS else 2 * blocks)


def features(n, k, m, config, mode, clusters):
    """What make_schedule() and predict_us() count."""
    rows, tokens, cluster, along, blocks, splits, exchange = parse(config)
    step_k, weight_bytes, token_bytes = {"f16": (64, 2, 2), "w8a16": (128, 1, 2)}.get(mode, (128, 1, 1))
    steps_of_tile, m_tiles = ceil_div(k, step_k), ceil_div(m, tokens * (cluster if along else 1))
    tiles = m_tiles * ceil_div(n, rows * (1 if along else cluster))
    room = clusters[blocks - 1][cluster]
    cut_tiles = shares = 0
    parts_in_cluster = 1
    if splits > 1:
        splits = min(splits, steps_of_tile)
        cut_tiles, shares = tiles, tiles * splits
        parts_in_cluster = splits if exchange and splits > 1 else 1
    elif splits == 0 and tiles % room:
        cut_tiles = tiles if tiles < room else tiles % room + room
        shares = min(max(cut_tiles * steps_of_tile // 4, 1), room)
    if shares > cut_tiles and parts_in_cluster == 1 and 8 * shares * cluster * rows * tokens > 96 << 20:
        cut_tiles = shares = 0  # more than the workspace holds
    stream = splits == 0 and shares > 0
    fragments = 1 + cut_tiles / shares if shares else 1
    if parts_in_cluster > 1:
        size = cluster * parts_in_cluster
        resident, share = clusters[blocks - 1][size], ceil_div(steps_of_tile, parts_in_cluster)
        ends = ceil_div(tiles, resident)
        steps = ends * share
        pair_steps = share * ((ends - 1) * busiest_pair(resident * size, blocks) + busiest_pair((tiles - (ends - 1) * resident) * size, blocks))
    else:
        ends = ceil_div(tiles - cut_tiles, room)
        steps = ends * steps_of_tile
        pair_steps = steps_of_tile * busiest_pair((tiles - cut_tiles) * cluster, blocks)
        if shares:
            rounds, share = ceil_div(shares, room), ceil_div(cut_tiles * steps_of_tile, shares)
            steps += rounds * share
            pair_steps += share * busiest_pair(shares * cluster, blocks)
            ends += rounds * (fragments if stream else 1)
    parts = shares / cut_tiles if shares > cut_tiles else 1
    staged = 8 if tokens <= 32 else 32 if tokens % 32 == 0 else 16 if tokens % 16 == 0 else 8
    if splits > 1 and shares <= room and tokens > staged:
        passed = 2 * (parts - 1) / parts  # each part adds up a slice
    else:
        passed = parts
    weights, kilobytes = n * k * weight_bytes * 1e-6, rows * tokens * 4e-3
    columns = rows * (1 if along else cluster)
    at_once = min(room / m_tiles, ceil_div(n, columns)) * columns * k * weight_bytes * 1e-6
    stage_weights = rows * step_k * weight_bytes / (cluster if along else 1)
    stage_tokens = tokens * step_k * token_bytes / (1 if along else cluster)
    split = parts > 1 and parts_in_cluster == 1 and not stream
    return dict(steps=steps * blocks, ends=ends * blocks, weights=weights,
                pair=pair_steps * stage_weights * 1e-6,
                reread=stream * (m_tiles - 1) * cut_tiles / tiles * at_once / (at_once + 50),
                moved=m * k * token_bytes * 1e-6 + m * n * 2e-6,
                l2=tiles * cluster * steps_of_tile * (stage_weights + stage_tokens) * 1e-6,
                products=tiles * cluster * rows * tokens * steps_of_tile * 2 * step_k * 1e-6,
                exchange=float(parts_in_cluster > 1), exchange_kb=(parts_in_cluster > 1) * kilobytes * ends,
                exchange_part=(parts_in_cluster > 1) * (parts_in_cluster - 2.0), turn=(parts_in_cluster > 1) * (ends - 1.0),
                turns=(parts_in_cluster > 1) * (ends - 1.0) * kilobytes,
                split=float(split), split_kb=split * kilobytes * passed, split_part=split * (parts - 2.0),
                stream=float(stream), stream_kb=stream * kilobytes * fragments)


def moved_at_random(p, free, cost, seconds, back_to=None):
    """p with one to three of `free` moved at a time, and kept where the cost fell; sometimes they return to `back_to`."""
    random, least, size, end, tries = np.random.default_rng(1), cost(p), 0.1, time.monotonic() + seconds, 0
    while time.monotonic() < end:
        moved = p.copy()
        some = random.choice(free, random.integers(1, min(3, len(free)) + 1), replace=False)
        moved[some] += random.normal(0, size, len(some))
        if back_to is not None and random.random() < 0.2:
            moved[some] = back_to[some]
        now = cost(moved)
        if now < least:
            p, least = moved, now
        tries += 1
        if tries % 500 == 0:
            size = max(0.02, 0.85 * size)
    return p


class Fit:
    def __init__(self, mode, samples, tiles=None):
        """samples: n, k, m, kernel, microseconds, clusters, and what else tells a cell from others of the same n, k, m."""
        self.mode, self.samples = mode, samples
        rows = [features(*s[:4], mode, s[5]) for s in samples]
        self.f = {key: np.array([row[key] for row in rows], float) for key in rows[0]}
        names = [tile_of(s[3]) for s in samples]
        self.tiles = sorted(tiles or set(names))
        self.tile = np.array([self.tiles.index(name) for name in names])
        cells = {}
        self.cell = np.array([cells.setdefault((*s[:3], *s[6:]), len(cells)) for s in samples])
        self.cells = len(cells)
        self.us = np.array([s[4] for s in samples])
        self.margin = np.array([1 if parse(s[3])[5] else STREAM_MARGIN if s[2] <= 2 * parse(s[3])[1] else WIDE_STREAM_MARGIN
                                for s in samples])
        self.best = np.full(self.cells, np.inf)
        np.minimum.at(self.best, self.cell, self.us)
        order = np.argsort(self.cell, kind="stable")
        starts = np.searchsorted(self.cell[order], np.arange(self.cells))
        self.in_cells = order, starts, np.diff(np.append(starts, len(order)))

    def first_guess(self, model):
        """The model that there is, and for what it does not know rough rates."""
        narrow = self.mode != "f16"
        guess = {key: model.get(key) or value for key, value in dict(FIRST_GUESS, tflops=1400.0 if narrow else 700.0).items()}
        costs = []
        for name in self.tiles:
            rows, tokens = parse(name)[:2]
            step = 2 * rows * max(tokens, 32 if narrow else 100) * (128 if narrow else 64) * SMS / (1.6e9 if narrow else 8e8)
            costs.append(model.get("tiles", {}).get(name, [step, 0.5e-4 * rows * tokens + 0.3]))
        return np.log(np.array(list(guess.values()) + [cost[0] for cost in costs] + [cost[1] for cost in costs]))

    def predict(self, p):
        q, f, count = dict(zip(QUANTITIES, np.exp(p))), self.f, len(QUANTITIES)
        step, end = np.exp(p[count:count + len(self.tiles)]), np.exp(p[count + len(self.tiles):])
        busy = f["steps"] * step[self.tile] + f["ends"] * end[self.tile]
        memory = (f["weights"] * (1 + q["reread"] * f["reread"]) + f["moved"]) / q["memory_tb_s"]
        if self.mode in PAIR_TB_S:
            memory = np.maximum(memory, f["pair"] / PAIR_TB_S[self.mode])
        overlapped = (busy**3 + memory**3 + (f["l2"] / q["l2_tb_s"])**3 + (f["products"] / q["tflops"])**3)**(1 / 3)
        parts = q["exchange_us_part"] * f["exchange_part"] + q["split_us_part"] * f["split_part"] + q["turn_us"] * f["turn"]
        return q["launch_us"] + overlapped + TURN_US_KB * f["turns"] + parts + sum(
            q[f"{way}_us"] * f[way] + q[f"{way}_us_kb"] * f[f"{way}_kb"] for way in ("exchange", "split", "stream"))

    def run(self, model, rounds=30, shrink=4.0):
        p = first = self.first_guess(model)
        y, damping = np.log(self.us), 1.0
        prior = 0.02 * len(y) / 1000
        by_cell = lambda v: np.bincount(self.cell, v, self.cells)
        centred = lambda v, w: v - (by_cell(w * v) / (by_cell(w) + shrink))[self.cell]
        close = np.clip((self.us / self.best[self.cell])**-2, 0.1, 1)  # the cell's fast candidates matter most
        for _ in range(rounds):
            raw = np.log(self.predict(p)) - y
            robust = 1 / np.maximum(1, np.abs(centred(raw, np.ones_like(raw))) / 0.06)
            w = robust * close
            rest = centred(raw, w)
            jacobian = np.empty((len(y), len(p)))
            for j in range(len(p)):
                moved = p.copy()
                moved[j] += 1e-4
                jacobian[:, j] = centred((np.log(self.predict(moved)) - y - raw) / 1e-4, w)
            normal = jacobian.T @ (jacobian * w[:, None]) + prior * np.eye(len(p))
            gradient = jacobian.T @ (rest * w) + prior * (p - first)
            cost = (w * rest**2).sum() + prior * ((p - first)**2).sum()
            for _ in range(8):
                step = np.clip(np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient), -0.5, 0.5)
                after = centred(np.log(self.predict(p + step)) - y, w)
                if (w * after**2).sum() + prior * ((p + step - first)**2).sum() < cost * 1.00001:
                    p, damping = p + step, max(damping / 4, 1e-5)
                    break
                damping *= 4
        return p

    def search(self, p, seconds, tiles=(), joins=False):
        count = len(QUANTITIES)
        free = [count + i + half * len(self.tiles) for i, name in enumerate(self.tiles) if name in tiles for half in (0, 1)] or range(len(p))
        if joins:
            free = [QUANTITIES.index(key) for key in JOINS]
        first, logs, weight = p, np.log(self.us), self.band_weights()

        def cost(p):
            off = np.log(self.predict(p)) - logs
            spread = np.abs(off - (np.bincount(self.cell, off, self.cells) / np.bincount(self.cell))[self.cell]).mean()
            return (weight * self.regrets(p)).sum() + 0.05 * spread + 0.0002 * ((p - first)**2).mean()

        return moved_at_random(p, free, cost, seconds)

    def search_steps(self, p, seconds, steps, kept):
        """Tiles' costs that choose better by these times and by `steps`, another Fit; a cost that moves must pay for it."""
        count = len(QUANTITIES)
        free = [count + i + half * len(self.tiles) for i, name in enumerate(self.tiles) if name not in kept for half in (0, 1)]
        first, weight = p, self.band_weights()

        def cost(p):
            return (weight * self.regrets(p)).sum() + steps.regrets(p).mean() + 0.0009 * np.abs(p - first).sum()

        return moved_at_random(p, free, cost, seconds, back_to=first)

    def band_weights(self):
        """Of cells: numbers of tokens in six bands, which count by the root of how many cells they have."""
        order, starts, _ = self.in_cells
        band = np.digitize([s[2] for s in self.samples], [9, 33, 65, 257, 1025])[order][starts]
        weight = 1 / np.sqrt(np.bincount(band, minlength=6)[band])
        return weight / weight.sum()

    def regrets(self, p):
        """Of cells: by how much (a logarithm) the choice takes longer than the fastest that was tried; a softened choice."""
        order, starts, counts = self.in_cells
        us = np.log(self.predict(p) * self.margin)[order]
        share = np.exp((np.repeat(np.minimum.reduceat(us, starts), counts) - us) / 0.02)
        lost = np.log(self.us / self.best[self.cell])[order]
        return np.add.reduceat(share * lost, starts) / np.add.reduceat(share, starts)

    def report(self, mode, p):
        us = self.predict(p) * self.margin
        chosen = [np.flatnonzero(self.cell == c)[np.argmin(us[self.cell == c])] for c in range(self.cells)]
        ratio = self.us[chosen] / self.best
        print(f"{mode}: {self.cells} cells, {len(us)} times; predicted choice / fastest {math.exp(np.log(ratio).mean()):.3f}, worst {ratio.max():.2f}")

    def entry(self, p, model):
        rounded = [float(f"{v:.4g}") for v in np.exp(p)]
        count = len(QUANTITIES)
        out = dict(zip(QUANTITIES, rounded))
        if self.mode in PAIR_TB_S:
            out["pair_tb_s"] = PAIR_TB_S[self.mode]
        out["tiles"] = dict(model.get("tiles", {}))
        out["tiles"].update({name: [rounded[count + i], rounded[count + len(self.tiles) + i]]
                             for i, name in enumerate(self.tiles) if (self.tile == i).sum() >= LEAST_SAMPLES})
        return out


def fitted(mode, samples, model, seconds, tiles=(), joins=False):
    if tiles or joins:
        samples = [s for s in samples if tile_of(s[3]) in {*model["tiles"], *tiles}]
    fit = Fit(mode, samples)
    p = fit.first_guess(model) if tiles or joins else fit.run(model)
    if seconds > 0:
        fit.report(f"{mode}, before the search", p)
        p = fit.search(p, seconds, tiles, joins)
    fit.report(mode, p)
    entry = fit.entry(p, model)
    if joins:
        entry = {**model, **{key: entry[key] for key in JOINS}}
    if tiles:
        entry = {**model, "tiles": model["tiles"] | {name: cost for name, cost in entry["tiles"].items() if name in tiles}}
    return mode, entry


def fitted_to_steps(mode, samples, steps, model, seconds, kept):
    known = lambda samples: [s for s in samples if tile_of(s[3]) in model["tiles"]]
    fit, of_steps = Fit(mode, known(samples), model["tiles"]), Fit(mode, known(steps), model["tiles"])
    p = fit.first_guess(model)
    fit.report(f"{mode}, before the search", p)
    of_steps.report(f"{mode}, steps, before the search", p)
    first, p = p, fit.search_steps(p, seconds, of_steps, kept)
    fit.report(mode, p)
    of_steps.report(f"{mode}, steps", p)
    entry = fit.entry(p, model)
    count = len(QUANTITIES)
    for i, name in enumerate(fit.tiles):
        for half in (0, 1):
            at = count + i + half * len(fit.tiles)
            if p[at] == first[at]:
                entry["tiles"][name][half] = model["tiles"][name][half]
    return mode, {**model, "tiles": entry["tiles"]}


def retune(choices, rows, models):
    """Choices for the numbers of tokens that were timed by themselves."""
    table = {(c["n"], c["k"], c["mode"]): dict(c["by_tokens"]) for c in choices}
    for row in rows:
        for key, mode in MODES.items():
            if key in row and row["m"] <= FINE_BUCKETS:
                best = min(row[key].items(), key=lambda tried: tried[1])[0]
                table.setdefault((row["n"], row["k"], mode), {})[str(row["m"])] = best
    out = []
    for (n, k, mode), by_tokens in table.items():
        kept = {m: by_tokens[m] for m in sorted(by_tokens, key=int) if mode not in models or int(m) <= FINE_BUCKETS}
        out.append({"n": n, "k": k, "mode": mode, "by_tokens": kept})
    return out


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    samples, tuned = collections.defaultdict(list), None
    arguments, seconds = sys.argv[2:], 0.0
    if "--search" in arguments:
        at = arguments.index("--search")
        seconds = float(arguments[at + 1])
        del arguments[at:at + 2]
    tiles = {}
    if "--tiles" in arguments:
        at = arguments.index("--tiles")
        mode, names = arguments[at + 1].split(":")
        tiles = {mode: names.split(",")}
        del arguments[at:at + 2]
        if not seconds:
            sys.exit("--tiles needs --search SECONDS, which is what fits their costs")
    joins = "--joins" in arguments
    if joins:
        arguments.remove("--joins")
        if not seconds or tiles:
            sys.exit("--joins needs --search SECONDS, and no --tiles beside it")
    kept, of_steps = collections.defaultdict(list), None
    while "--keep" in arguments:
        at = arguments.index("--keep")
        mode, names = arguments[at + 1].split(":")
        kept[mode] += names.split(",")
        del arguments[at:at + 2]
    if "--steps" in arguments:
        at = arguments.index("--steps")
        of_steps = collections.defaultdict(list)
        for path in arguments[at + 1:]:
            with open(path) as file:
                for row in map(json.loads, file):
                    of_steps[row.get("mode")] += [(row["n"], row["k"], row["tokens"], config, us / row["layers"], clusters_of({}), row["model"])
                                                  for config, us in row.get("step_us", {}).items() if is_candidate(config, row["mode"])]
        del arguments[at:]
        if not seconds or tiles or joins:
            sys.exit("--steps needs --search SECONDS, and neither --tiles nor --joins beside it")
    for path in arguments:
        if path == "--tuned":
            tuned = []
            continue
        clusters = clusters_of({})
        with open(path) as file:
            for row in map(json.loads, file):
                if tuned is not None:
                    tuned.append(row)
                if "machine" in row:
                    clusters = clusters_of(row)
                for key, mode in MODES.items():
                    samples[mode] += [(row["n"], row["k"], row["m"], config, us, clusters)
                                      for config, us in row.get(key, {}).items() if is_candidate(config, mode)]
    with open(sys.argv[1]) as file:
        table = json.load(file)
    models = dict(table.get("models", {}))
    with multiprocessing.Pool() as pool:
        if of_steps:
            models.update(pool.starmap(fitted_to_steps, [(mode, samples[mode], of_steps[mode], models[mode], seconds, kept[mode])
                                                         for mode in models if samples[mode] and of_steps[mode]]))
        else:
            models.update(pool.starmap(fitted, [(mode, samples[mode], models.get(mode, {}), seconds, tiles.get(mode, ()), joins)
                                            for mode in (tiles or MODES.values()) if samples[mode]]))
    table = {"format": "nestedfp gemm choices 2", "device": table["device"], "models": models,
             "choices": table["choices"] if tuned is None else retune(table["choices"], tuned, models)}
    text = re.sub(r"\[\s+([\d.e-]+),\s+([\d.e-]+)\s+\]", r"[\1, \2]", json.dumps(table, indent=1))
    with open(sys.argv[1], "w") as file:
        file.write(text + "\n")


if __name__ == "__main__":
    main()
