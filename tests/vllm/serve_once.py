"""serve_once.py MODEL OUT.json [--quantization Q] [--policy P] [--per-step] [--dtype T] [--lora DIR] [--speculate | --draft DIR]
[--steps N] [--start-with DIR [--sleep]]: one vLLM engine over a tiny model; writes what test_serving.py compares. A process of its own, since an
engine leaves much behind."""

import argparse
import json
import time

PROMPTS = 6
ANSWER = 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--quantization")
    parser.add_argument("--policy")
    parser.add_argument("--per-step", action="store_true", help="nestedfp's scheduler and worker")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--eager", action="store_true", help="no torch.compile, no graphs: starts sooner")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--expert-parallel", action="store_true", help="experts whole on either GPU, not cut")
    parser.add_argument("--attention", help="vLLM's attention backend")
    parser.add_argument("--lora", help="an adapter that all requests use")
    parser.add_argument("--steps", type=int, default=0, help="so many decode steps more")
    parser.add_argument("--speculate", action="store_true", help="drafts by n-grams, and prompts that repeat themselves")
    parser.add_argument("--draft", help="drafts by this model")
    parser.add_argument("--start-with", help="a model of the same shapes; MODEL's weights are read into the running engine")
    parser.add_argument("--sleep", action="store_true", help="throw the weights of --start-with away before that")
    arguments = parser.parse_args()

    import numpy as np
    from vllm import LLM, SamplingParams

    extra = {}
    if arguments.policy:
        extra["additional_config"] = {"nestedfp": {"policy": arguments.policy}}
    if arguments.per_step:
        extra.update(scheduler_cls="nestedfp.vllm.scheduler.Scheduler", worker_cls="nestedfp.vllm.worker.Worker")
    if arguments.attention:
        extra["attention_backend"] = arguments.attention
    if arguments.lora:
        extra.update(enable_lora=True, max_lora_rank=8, max_loras=1)
    if arguments.speculate:
        extra.update(speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3,
                                         "prompt_lookup_min": 1})
    if arguments.draft:
        extra.update(speculative_config={"method": "draft_model", "model": arguments.draft, "num_speculative_tokens": 3})
    if arguments.per_step or arguments.speculate or arguments.draft:
        extra.update(disable_log_stats=False)
    if arguments.sleep:
        extra.update(enable_sleep_mode=True)
    begin = time.time()
    llm = LLM(model=arguments.start_with or arguments.model, quantization=arguments.quantization, dtype=arguments.dtype,
              skip_tokenizer_init=True, max_model_len=256, max_num_seqs=16, max_num_batched_tokens=512,
              kv_cache_memory_bytes=1 << 28, gpu_memory_utilization=0.05, enable_prefix_caching=False,
              generation_config="vllm", seed=0,
              tensor_parallel_size=arguments.tensor_parallel,
              pipeline_parallel_size=arguments.pipeline_parallel, enable_expert_parallel=arguments.expert_parallel,
              enforce_eager=arguments.eager,
              compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 64]}, **extra)
    started = time.time() - begin
    for _ in range(2 if arguments.sleep else 1):  # a second time, of what the first one has put in place
        if arguments.sleep:
            llm.sleep(level=2)
            llm.wake_up(tags=["weights"])
        if arguments.start_with:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": arguments.model})
        if arguments.sleep:
            llm.wake_up(tags=["kv_cache"])
    config = llm.llm_engine.vllm_config
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, 500, size=40 + 3 * i).tolist() for i in range(PROMPTS)]
    if arguments.speculate:
        prompts = [ids[:20] * 2 for ids in prompts]
    adapter = {}
    if arguments.lora:
        from vllm.lora.request import LoRARequest

        adapter["lora_request"] = LoRARequest("adapter", 1, arguments.lora)

    def scores(ids: list[int], **fields) -> list[float]:
        """The log-probability of each token of a prompt, given those before it."""
        parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True,
                                    **fields)
        (result,) = llm.generate([{"prompt_token_ids": ids}], parameters, use_tqdm=False, **adapter)
        return [step[token].logprob for step, token in zip(result.prompt_logprobs[1:], ids[1:])]

    report = {"start_s": started, "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
              "v2_runner": config.use_v2_model_runner}
    report["prompts"] = [scores(ids) for ids in prompts]
    if arguments.per_step:
        for tier in ("exact", "fast"):
            report[tier] = [scores(ids, extra_args={"nestedfp_precision": tier}) for ids in prompts]
    # Answers by decode steps (graphs), batched and alone, beside the same tokens read as a prompt.
    length = 3 * ANSWER if arguments.speculate or arguments.draft else ANSWER
    parameters = SamplingParams(temperature=0, max_tokens=length, logprobs=0, detokenize=False, ignore_eos=True,
                                extra_args={"nestedfp_precision": "exact"} if arguments.per_step else None)
    together = llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False, **adapter)
    worst = 0.0
    answers = []
    for ids, result in zip(prompts, together):
        tokens = list(result.outputs[0].token_ids)
        answers.append(tokens)
        decoded = [step[token].logprob for step, token in zip(result.outputs[0].logprobs, tokens)]
        fields = {"extra_args": {"nestedfp_precision": "exact"}} if arguments.per_step else {}
        read = scores(ids + tokens, **fields)[-len(tokens):]
        worst = max(worst, max(abs(a - b) for a, b in zip(decoded, read)))
    report["answers"] = answers
    report["decode_vs_prompt"] = worst
    if arguments.per_step or arguments.speculate or arguments.draft:
        report["metrics"] = {f"{m.name}{sorted(m.labels.values())}": m.value for m in llm.get_metrics()
                             if hasattr(m, "value") and ("spec_decode" in m.name or "nestedfp" in m.name)}
    long = SamplingParams(temperature=0, max_tokens=200, detokenize=False, ignore_eos=True)
    if arguments.per_step:
        for count in range(1, PROMPTS + 1):  # every step of prompts that the steps below have, in either precision
            for tier in ("exact", "fast"):
                few = SamplingParams(temperature=0, max_tokens=4, detokenize=False, ignore_eos=True,
                                     extra_args={"nestedfp_precision": tier})
                llm.generate([{"prompt_token_ids": ids} for ids in prompts[:count]], few, use_tqdm=False, **adapter)
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], long, use_tqdm=False, **adapter)
        report["activity"] = [llm.collective_rpc("nestedfp_activity")]
    for begin in range(0, arguments.steps, 200):
        count = 1 + begin // 200 % PROMPTS
        llm.generate([{"prompt_token_ids": ids} for ids in prompts[:count]], long, use_tqdm=False)
    if arguments.per_step:
        report["activity"].append(llm.collective_rpc("nestedfp_activity"))
    with open(arguments.out, "w") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main()
