"""The names that dashboards made for vLLM draw are there, with the labels they use, and count what they say."""

import re

import httpx

# What the panels of vLLM's own dashboard query:
# https://github.com/vllm-project/vllm/blob/main/examples/observability/prometheus_grafana/grafana.json
GRAFANA = """
vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum vllm:e2e_request_latency_seconds_count
vllm:prompt_tokens_total vllm:generation_tokens_total
vllm:inter_token_latency_seconds_bucket vllm:inter_token_latency_seconds_sum vllm:inter_token_latency_seconds_count
vllm:num_requests_running vllm:num_requests_waiting
vllm:time_to_first_token_seconds_bucket vllm:time_to_first_token_seconds_sum vllm:time_to_first_token_seconds_count
vllm:kv_cache_usage_perc
vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
vllm:request_success_total
vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum vllm:request_decode_time_seconds_sum
vllm:request_max_num_generation_tokens_sum
""".split()

# All that vLLM exports, by its documentation (https://docs.vllm.ai/en/latest/usage/metrics.html and
# https://docs.vllm.ai/en/latest/design/metrics.html).
VLLM = """
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:cache_config_info vllm:lora_requests_info
vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total vllm:num_preemptions_total vllm:prompt_tokens_total
vllm:spec_decode_num_drafts_total vllm:spec_decode_num_draft_tokens_total vllm:spec_decode_num_accepted_tokens_total
vllm:prompt_tokens_cached_total vllm:generation_tokens_total vllm:request_success_total vllm:iteration_tokens_total_count
vllm:time_to_first_token_seconds_count vllm:inter_token_latency_seconds_count vllm:request_time_per_output_token_seconds_count
vllm:time_per_output_token_seconds_count vllm:e2e_request_latency_seconds_count vllm:request_queue_time_seconds_count
vllm:request_inference_time_seconds_count vllm:request_prefill_time_seconds_count vllm:request_decode_time_seconds_count
vllm:request_prompt_tokens_count vllm:request_generation_tokens_count vllm:request_max_num_generation_tokens_count
vllm:request_prefill_kv_computed_tokens_count vllm:request_params_n_count vllm:request_params_max_tokens_count
http_requests_total http_request_duration_highr_seconds_count
process_cpu_seconds_total process_resident_memory_bytes process_virtual_memory_bytes process_start_time_seconds
process_open_fds process_max_fds
""".split()

# And what has no meaning here.
NOT_APPLICABLE = {
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "drafts are not counted by their place",
    "vllm:mm_cache_queries_total": "models take text only",
    "vllm:mm_cache_hits_total": "models take text only",
    "vllm:corrupted_requests_total": "logits are not searched for NaN",
    "vllm:kv_block_lifetime_seconds_count": "blocks are not sampled",
    "vllm:kv_block_reuse_gap_seconds_count": "blocks are not sampled",
    "vllm:kv_block_idle_before_evict_seconds_count": "blocks are not sampled",
}


def lines(server):
    return httpx.get(server.url + "/metrics").text


def names(text):
    return set(re.findall(r"^([a-z]+[a-z0-9_:]*)[ {]", text, re.M))


def test_names_of_dashboards(launch):
    server = launch()
    httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 3, "n": 2})
    text = lines(server)
    there = names(text)
    assert set(GRAFANA) <= there, set(GRAFANA) - there
    assert set(VLLM) <= there, set(VLLM) - there
    # A name that has come is no longer "not applicable", and a dashboard needs none of these.
    assert not set(NOT_APPLICABLE) & (there | set(GRAFANA))
    for name in GRAFANA:  # the dashboards select by this label
        assert re.search(rf'^{name}\{{[^}}]*model_name="fake"', text, re.M), name
    assert re.search(r'^vllm:request_success_total\{[^}]*finished_reason="length"[^}]*\} 2$', text, re.M)
    assert all(f"# TYPE {name} " in text for name in ("http_requests_total", "vllm:request_params_n"))


def value(text, line):
    found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.M)
    return float(found.group(1)) if found else 0.0


def test_requests_by_path_and_status(launch):
    server = launch("--root-path", "/llm", "--api-key", "k")
    key = {"Authorization": "Bearer k"}
    host = server.url[:-4]

    def post(path, body, headers=key):
        return httpx.post(host + path, json=body, headers=headers).status_code
    assert post("/llm/v1/completions", {"prompt": "SAY:x"}) == 200
    assert post("/v1/completions", {"prompt": "SAY:x", "stream": True}) == 200
    assert post("/v1/completions", {"prompt": "SAY:x", "top_p": 9}) == 400
    assert post("/v1/completions", {}, {}) == 401
    assert post("/no/such/path", {}) == 404
    assert httpx.get(host + "/v1/models/a%2Fb", headers=key).status_code == 404
    assert httpx.get(host + "/v1/models/fake/alias", headers=key).status_code == 200
    with server.connect() as s:
        s.sendall(b"\x00\x01 nonsense\r\n\r\n")
        assert s.recv(100).startswith(b"HTTP/1.1 400")
    text = httpx.get(server.url + "/metrics").text
    for line, count in (('{handler="/v1/completions",method="POST",status="2xx"}', 2),
                        ('{handler="/v1/completions",method="POST",status="4xx"}', 2),
                        ('{handler="/v1/models/{id}",method="GET",status="2xx"}', 1),
                        ('{handler="/v1/models/{id}",method="GET",status="4xx"}', 1),
                        ('{handler="none",method="POST",status="4xx"}', 1),
                        ('{handler="none",method="other",status="4xx"}', 1)):
        assert value(text, "http_requests_total" + line) == count, line
    total = sum(float(v) for v in re.findall(r"^http_requests_total\{.*\} (\S+)$", text, re.M))
    assert value(text, "http_request_duration_highr_seconds_count") == total >= 8


def test_what_requests_ask_for(launch):
    server = launch()
    httpx.post(server.url + "/v1/completions", json={"prompt": "y" * 40, "max_tokens": 3, "n": 4})
    httpx.post(server.url + "/v1/completions", json={"prompt": "y" * 40, "max_tokens": 7})
    assert server.metric("vllm:request_params_n_sum") == 5 and server.metric("vllm:request_params_n_count") == 2
    assert server.metric("vllm:request_params_max_tokens_sum") == 4 * 3 + 7
    # As vLLM counts it: of all answers to a prompt, what the longest has.
    httpx.post(server.url + "/v1/completions", json={"prompt": ["SAY:ab", "SAY:abcd"], "max_tokens": 30, "n": 2})
    assert server.metric("vllm:request_max_num_generation_tokens_count") == 4
    assert server.metric("vllm:request_max_num_generation_tokens_sum") == 3 + 7 + 3 + 5
    cached = server.metric("vllm:prompt_tokens_cached_total")
    assert cached > 0
    prompts = server.metric("vllm:request_prompt_tokens_sum")
    assert prompts == 5 * 40 + 2 * 6 + 2 * 8
    assert server.metric("vllm:request_prefill_kv_computed_tokens_sum") == prompts - cached


def test_prompts_count_with_their_first_token(launch):
    server = launch("--step-us", 20000)
    with httpx.stream("POST", server.url + "/v1/completions", json={"prompt": "y" * 40, "max_tokens": 500, "stream": True}) as r:
        stream = r.iter_lines()
        next(stream)
        assert server.metric("vllm:prompt_tokens_total") == 40 and server.metric("vllm:request_prompt_tokens_count") == 0
    server.wait_idle()
    assert server.metric("vllm:prompt_tokens_total") == 40


def test_facts_of_the_process(launch):
    server = launch()
    assert 0 < server.metric("process_open_fds") < server.metric("process_max_fds")
    import time
    assert abs(server.metric("process_start_time_seconds") - time.time()) < 600
    assert server.metric("process_virtual_memory_bytes") >= server.metric("process_resident_memory_bytes") > 1 << 20
