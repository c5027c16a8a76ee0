// One answer of the server as it comes.
function headers() {
  const h = {"Content-Type": "application/json"};
  if ($("key").value) h.Authorization = "Bearer " + $("key").value;
  return h;
}

// A good answer of the server, or an Error that says what is wrong. What a proxy before it answers need not be JSON.
async function call(path, options) {
  let response;
  try {
    response = await fetch(base + path, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("the server does not answer");
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  const text = told?.error?.message || `the server answers ${response.status} ${response.statusText}`.trim();
  throw Object.assign(new Error(text), {status: response.status});
}

function settings() {
  const number = id => $(id).value === "" ? undefined : Number($(id).value);
  return {max_tokens: number("max_tokens"), temperature: number("temperature"), top_p: number("top_p"),
          top_k: number("top_k"), min_p: number("min_p"), seed: number("seed")};
}

// What was set stays so where the page is loaded again, in this tab; a key is not kept.
function keepSettings() {
  let set = {};
  try {
    set = JSON.parse(sessionStorage.getItem(storeKey) || "{}");
  } catch { /* a browser that keeps nothing */ }
  for (const input of document.querySelectorAll("#settings :is(input, select, textarea):not(#key)")) {
    if (typeof set[input.id] === "string") Object.assign(input, {value: set[input.id]}).dataset.touched = "1";
    input.addEventListener("input", () => {
      input.dataset.touched = "1";
      set[input.id] = input.value;
      try {
        sessionStorage.setItem(storeKey, JSON.stringify(set));
      } catch { /* the same */ }
    });
  }
}

// Fills `into` (content, thoughts, tokens, meta) and calls `changed` for each piece; `fault` is set where it fails.
async function ask(body, signal, into, changed) {
  const began = performance.now(), lost = () => new Error("the server went away before the answer was done");
  Object.assign(into, {content: "", thoughts: "", meta: "", fault: ""});
  try {
    const response = await call("/v1/chat/completions", {method: "POST", headers: headers(), body: JSON.stringify({...body, stream: true}), signal});
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "", cut = false, whole = false;
    for (;;) {
      const {value, done} = await reader.read().catch(error => { throw error.name === "AbortError" ? error : lost(); });
      if (done) break;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        whole ||= event === "data: [DONE]";
        if (!event.startsWith("data: ") || whole) continue;
        const data = JSON.parse(event.slice(6));
        if (data.error) throw new Error(data.error.message);
        for (const choice of data.choices) {
          into.content += choice.delta.content || "";
          into.thoughts += choice.delta.reasoning_content || "";
          cut ||= choice.finish_reason === "length";
          if (into.tokens && choice.logprobs) into.tokens.push(...(choice.logprobs.content || []).map(t => t.token));
        }
        if (data.nestedfp) into.meta = {counts: data.nestedfp, seconds: (performance.now() - began) / 1000, cut: cut && (body.max_tokens === undefined ? "the context is full" : "Max tokens")};
      }
      changed();
    }
    if (!whole) throw lost();  // a proxy may end the stream as if it were
  } catch (error) {
    if (error.name === "AbortError") into.meta = "stopped"; else into.fault = error.message;
  }
  changed();
}

// "120 tokens in 3.1 s, cut off: Max tokens · prompt [bar] FP16 31, FP8 0 · answer [bar] FP16 90, FP8 30".
function showMeta(element, meta) {
  if (!meta || !meta.counts) {
    element.textContent = meta || "";
    return;
  }
  const {prompt, completion} = meta.counts, n = completion.fp16_tokens + completion.fp8_tokens;
  element.textContent = `${n} tokens in ${meta.seconds.toFixed(1)} s` + (meta.cut ? `, cut off: ${meta.cut}` : "");
  for (const [name, c] of [["prompt", prompt], ["answer", completion]]) {
    const all = c.fp16_tokens + c.fp8_tokens, bar = document.createElement("span"), part = document.createElement("i");
    bar.className = "share";
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", `${name}: ${c.fp16_tokens} tokens in FP16, ${c.fp8_tokens} in FP8`);
    part.style.width = (all ? 100 * c.fp8_tokens / all : 0) + "%";
    bar.append(part);
    element.append(` · ${name}`, bar, `FP16 ${c.fp16_tokens}, FP8 ${c.fp8_tokens}`);
  }
}

// Where two answers part: index of the first differing token, or -1; and how much text is before it.
function firstDifference(a, b) {
  let length = 0;
  for (let i = 0; i < Math.max(a.length, b.length); i++) {
    if (a[i] !== b[i]) return {token: i, length};
    length += a[i].length;
  }
  return {token: -1, length};
}
