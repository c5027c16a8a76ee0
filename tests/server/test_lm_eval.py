"""The lm-eval package, unmodified, scores the demo model through the server: likelihoods of prompts (echo and logprobs)
and generated answers, request by request and in concurrent batches, with equal results. Its tasks are made here."""

import json
import os

import pytest

os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1")
pytest.importorskip("lm_eval", reason="lm_eval is not installed (tests/requirements-lm-eval.txt)")
import lm_eval.tasks  # noqa: E402

FACTS = [("The sky is", ["blue", "made of cheese"]), ("Fire is", ["hot", "cold as ice"]),
         ("Paris is the capital of", ["France", "Japan"]), ("Two plus two is", ["four", "eleven"]),
         ("Fish live in", ["water", "the oven"]), ("At night it is", ["dark", "always noon"])]
QUESTIONS = [("What is the capital of France?", "Paris"), ("What is the capital of Italy?", "Rome"),
             ("What is the capital of Germany?", "Berlin"), ("What is the capital of Japan?", "Tokyo")]


@pytest.fixture(scope="module")
def exact(launch_real):
    """All steps in FP16: what a busy server computes in FP8 differs from what it computes alone."""
    return launch_real("--precision", "fp16", "--max-num-seqs", 16, "--max-model-len", 2048, "--kv-cache-memory", "512MB")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "facts.jsonl").write_text("\n".join(json.dumps({"q": q, "choices": c, "gold": 0}) for q, c in FACTS))
    (folder / "capitals.jsonl").write_text("\n".join(json.dumps({"q": q, "a": a}) for q, a in QUESTIONS))
    data = "dataset_path: json\ndataset_kwargs: {{data_files: {{test: {}}}, cache_dir: {}}}\ntest_split: test\n"
    for name, rest in (
            ("facts", 'output_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: "{{choices}}"\n'
                      "doc_to_target: gold\nmetric_list: [{metric: acc}]\n"),
            ("text", 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{q}} {{choices[0]}}."\n'
                     "metric_list: [{metric: word_perplexity}]\n"),
            ("capitals", 'output_type: generate_until\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\n'
                         "generation_kwargs: {until: ['\\n\\n'], max_gen_toks: 24, do_sample: false, temperature: 0}\n"
                         "metric_list: [{metric: exact_match}]\n")):
        source = folder / ("facts.jsonl" if name == "text" else f"{name}.jsonl")
        (folder / f"{name}.yaml").write_text(f"task: nestedfp_{name}\n" + data.format(source, folder / "cache") + rest)
    return lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)


def evaluate(tasks, names, model, arguments, batch, chat=False):
    result = lm_eval.simple_evaluate(model=model, model_args=arguments, tasks=names, task_manager=tasks, batch_size=batch,
                                     bootstrap_iters=0, apply_chat_template=chat, log_samples=True)
    samples = {name: [s["filtered_resps"] for s in sorted(result["samples"][name], key=lambda s: s["doc_id"])]
               for name in names}
    return samples, result["results"]


def test_likelihoods_in_batches_as_one_by_one(exact, tasks):
    names = ["nestedfp_facts", "nestedfp_text"]
    arguments = (f"model=demo,base_url={exact.url}/v1/completions,tokenized_requests=False,tokenizer_backend=remote,"
                 "max_length=2048,num_concurrent=")
    alone, results = evaluate(tasks, names, "local-completions", arguments + "1", 1)
    together, results_together = evaluate(tasks, names, "local-completions", arguments + "3", 4)
    assert together == alone
    for name, metric in (("nestedfp_facts", "acc,none"), ("nestedfp_text", "word_perplexity,none")):
        assert results[name][metric] == results_together[name][metric]
    assert results["nestedfp_facts"]["acc,none"] >= 0.8  # and they mean something
    assert 1 < results["nestedfp_text"]["word_perplexity,none"] < 1e4


def test_chat_in_batches_as_one_by_one(exact, tasks):
    arguments = f"model=demo,base_url={exact.url}/v1/chat/completions,max_length=2048,num_concurrent="
    alone, _ = evaluate(tasks, ["nestedfp_capitals"], "local-chat-completions", arguments + "1", 1, chat=True)
    together, _ = evaluate(tasks, ["nestedfp_capitals"], "local-chat-completions", arguments + "4", 1, chat=True)
    assert together == alone
    right = sum(answer in response[0] for (_, answer), response in zip(QUESTIONS, alone["nestedfp_capitals"]))
    assert right >= 2, alone
