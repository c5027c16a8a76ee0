// The load: what the server did in each quarter of a second of the last minute, and why it changed precision.
const slices = new Map();
const switches = [];
let started = 0, newest = -1, now = 0, sliceMs = 250, policy = null, clockOffset = 0;
const kept = 240;

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function surface(id) {
  const canvas = $(id), ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width) return null;  // in a tab that is not shown
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  return [context, width, height];
}

const axis = 18, headroom = 16;  // pixels below (marks of switches over times) and above what is drawn

// Bars of the last minute, the parts of each above each other, in whole pixels so that they close up evenly; a time axis,
// a line at `line.at` and a tick at each switch. `label` names the top.
function bars(id, label, parts, {top = 0, line = null} = {}) {
  const got = surface(id);
  if (!got) return;
  const [c, w, h] = got, first = now - kept, floor = h - axis, room = floor - headroom;
  const value = (i, key) => slices.get(i)?.[key] || 0;
  if (!top) {
    top = line ? line.at * 1.2 : 1;
    for (let i = first; i < now; i++) top = Math.max(top, parts.reduce((sum, [key]) => sum + value(i, key), 0));
  }
  for (let i = first; i < now; i++) {
    const left = Math.round((i - first) * w / kept), right = Math.round((i - first + 1) * w / kept);
    let from = floor;
    for (const [key, name] of parts) {
      const height = value(i, key) / top * room;
      c.fillStyle = colour(name);
      c.fillRect(left, from - height, Math.max(right - left, 1), height);
      from -= height;
    }
  }
  c.fillStyle = colour("--soft");
  c.fillRect(0, floor, w, 1);
  c.textBaseline = "bottom";
  const seconds = kept * sliceMs / 1000;
  for (const [part, align] of [[0, "left"], [.5, "center"], [1, "right"]]) {
    c.textAlign = align;
    c.fillText(part === 1 ? "now" : `−${seconds * (1 - part)} s`, part === 0 ? 3 : part === 1 ? w - 3 : w * part, h);
    c.fillRect(Math.min(w - 1, w * part), floor, 1, 3);
  }
  for (const one of switches) {
    if (one.i < first) continue;
    c.fillStyle = colour(one.precision === "fp16" ? "--fp16" : "--fp8");
    const x = (one.i - first) * w / kept;
    c.beginPath();
    c.moveTo(x - 3, floor + 6); c.lineTo(x + 3, floor + 6); c.lineTo(x, floor + 1);
    c.fill();
  }
  if (line) {
    const y = Math.round(floor - line.at / top * room) + .5;
    c.strokeStyle = colour("--late");
    c.setLineDash([5, 4]);
    c.lineWidth = 1.5;
    c.beginPath(); c.moveTo(0, y); c.lineTo(w, y); c.stroke();
    c.setLineDash([]);
  }
  c.fillStyle = colour("--soft");
  c.textAlign = "left";
  c.textBaseline = "top";
  c.fillText(label(top), 5, 2);
}

const numbers = () => (policy?.name || "").split(":").slice(1).map(Number);
const kind = () => (policy?.name || "").split(":")[0];
const plans = () => kind().startsWith("slo");

// What the policy does, in words.
function policyText() {
  if (!policy) return "";
  const [a, b] = numbers(), itl = +policy.itl_ms.toFixed(1), ttft = +policy.ttft_ms.toFixed(1);
  const slo = `first tokens within ${ttft} ms, then one every ${itl} ms`;
  return {
    "slo": `FP16, and as much FP8 as ${slo} need, by predicted step times.`,
    "slo-fp16": `FP16 always; steps are planned for ${slo}.`,
    "slo-fp8": `FP8 always; steps are planned for ${slo}.`,
    "threshold": `FP8 in steps of more than ${a} tokens, else FP16.`,
    "graded": `FP16 in steps of up to ${a} tokens, then FP8 in a growing share of the weights, in all of them from ${b} tokens.`,
    "alternate": `Another precision every ${a} steps, for demonstration.`,
    "fp16": "FP16 always.", "fp8": "FP8 always.", "fp8-w8a8": "FP8 always.",
  }[kind()] || policy.name;
}

// The number that the policy holds steps against.
function policyLine() {
  if (!policy) return null;
  if (plans()) return {at: policy.itl_ms, key: "most_ms", text: `target between tokens, ${+policy.itl_ms.toFixed(1)} ms`};
  if (kind() === "threshold") return {at: numbers()[0], key: "most_tokens", text: `threshold, ${numbers()[0]} tokens`};
  if (kind() === "graded") return {at: numbers()[0], key: "most_tokens", text: `FP8 above ${numbers()[0]} tokens`};
  return null;
}

function level(one) {
  if (one.precision === "fp16") return "FP16";
  return one.share > 0 && one.share < 1 ? `FP8 in ${Math.round(100 * one.share)} %` : "FP8";
}

// Why a step changed precision: "12 waiting, ITL 61 ms over 50".
function whyText(one) {
  const [a, b] = numbers(), faster = one.precision !== "fp16";
  const crowd = [one.waiting ? `${one.waiting} waiting` : "", `${one.running} in the step`].filter(Boolean).join(", ");
  const tokens = `${one.tokens} tokens${one.prefill ? ` (${one.prefill} of prompts)` : ""}`;
  const step = one.predicted_ms ? `, ${tokens} in ${one.predicted_ms.toFixed(0)} ms` : `, ${tokens}`;
  const told = {
    first_tokens: `a first token would come after ${policy?.ttft_ms?.toFixed(0)} ms`,
    pace: `ITL would be over ${policy?.itl_ms?.toFixed(0)} ms`,
    room: "targets are kept without",
    requests: "requests ask for it",
  }[one.why];
  if (told) return `${crowd}${step}: ${told}`;
  if (kind() === "threshold") return `${crowd}, step of ${tokens}, ${faster ? "over" : "not over"} ${a}`;
  if (kind() === "graded") return `${crowd}, step of ${tokens} between ${a} and ${b}`;
  if (kind() === "alternate") return `every ${a} steps`;
  if (plans()) {
    const over = one.predicted_ms > policy.itl_ms ? `ITL ${one.predicted_ms.toFixed(0)} ms over ${policy.itl_ms.toFixed(0)}` : `step of ${one.predicted_ms.toFixed(0)} ms`;
    return `${crowd}, ${over}${one.lost ? `, ${one.lost} late whatever is done` : ""}${faster ? "" : ": targets are kept without FP8"}`;
  }
  return `${crowd}, step of ${tokens}`;
}

function showSwitches() {
  if (!switches.length) return;
  $("why").replaceChildren(...switches.slice(-6).reverse().map(one => {
    const item = document.createElement("li"), time = document.createElement("time"), to = document.createElement("b");
    const when = new Date(clockOffset + one.at_ms);
    time.dateTime = when.toISOString();
    time.textContent = when.toLocaleTimeString("en-GB");
    to.textContent = "to " + level(one);
    item.append(time, to, ": " + whyText(one));
    return item;
  }));
}

function draw() {
  const line = policyLine();
  const perSecond = top => Math.round(top * 1000 / sliceMs).toLocaleString("en") + " tokens/s";
  bars("decode", perSecond, [["decode_fp16", "--fp16"], ["decode_fp8", "--fp8"]]);
  bars("prefill", perSecond, [["prefill_fp16", "--fp16"], ["prefill_fp8", "--fp8"]]);
  const key = line?.key || "most_ms";
  bars("step", top => key === "most_ms" ? `${+top.toPrecision(3)} ms` : `${Math.round(top)} tokens`, [[key, "--soft"]], {line});
  bars("queue", String, [["running", "--soft"], ["waiting", "--late"]]);
  bars("kv", () => "100 %", [["kv", "--soft"]], {top: 1});
}

function take(data) {
  if (data.started_ms !== started) {
    if (started) {  // the server was started again: its numbers begin anew, and it was asked for those after an old one
      slices.clear();
      switches.length = 0;
      newest = -1;
      started = 0;
      return showModel();
    }
    started = data.started_ms;
    clockOffset = Date.now() - data.now * data.slice_ms;
  }
  now = data.now;
  sliceMs = data.slice_ms;
  policy = data.policy;
  for (const s of data.slices) {
    s.decode_fp16 = s.fp16 - s.prefill_fp16;
    s.decode_fp8 = s.fp8 - s.prefill_fp8;
    slices.set(s.i, s);
    newest = Math.max(newest, s.i);
  }
  for (const i of slices.keys()) if (i < now - kept) slices.delete(i);
  const known = new Set(switches.map(one => one.at_ms + "/" + one.precision));
  switches.push(...data.switches.filter(one => !known.has(one.at_ms + "/" + one.precision)));
  switches.splice(0, switches.length - 500);
}

// Screen readers read it out whenever it is set.
function showState(text) {
  if ($("state").textContent !== text) $("state").textContent = text;
}

async function poll() {
  try {
    const response = await call("/nestedfp/timeline?after=" + Math.max(newest - 2, -1), {signal: AbortSignal.timeout(5000)}), data = await response.json();
    take(data);
    const last = [1, 2, 3, 4].map(k => slices.get(now - k)).filter(Boolean);
    const rate = key => Math.round(last.reduce((sum, s) => sum + s[key], 0) * 1000 / sliceMs / 4).toLocaleString("en") + "/s";
    $("fp16_now").textContent = rate("decode_fp16");
    $("fp8_now").textContent = rate("decode_fp8");
    $("prefill_fp16_now").textContent = rate("prefill_fp16");
    $("prefill_fp8_now").textContent = rate("prefill_fp8");
    const line = policyLine(), key = line?.key || "most_ms", most = Math.max(0, ...last.map(s => s[key]));
    $("step_title").textContent = key === "most_ms" ? "Longest step, ms" : "Largest step, tokens";
    $("step_value").textContent = last.length ? (key === "most_ms" ? most.toFixed(1) + " ms" : most + " tokens") : "–";
    $("line_legend").hidden = !line;
    if (line) $("line_text").textContent = line.text;
    $("policy").textContent = policyText();
    $("switches").textContent = data.precision_switches.toLocaleString("en");
    $("running").textContent = data.running;
    $("waiting").textContent = data.waiting;
    $("kv_use").textContent = (100 * data.kv_use).toFixed(1) + " %";
    $("kv_tokens").textContent = data.kv_tokens.toLocaleString("en");
    for (const [row, values] of [["ttft", data.ttft_ms], ["tpot", data.tpot_ms]]) {
      for (const p of ["p50", "p90", "p99"]) $(row + "_" + p).textContent = values[p] === null ? "–" : values[p].toFixed(1);
      $(row + "_count").textContent = values.count;
    }
    showState("ready");
    showDemoLoad(data.demo_load);
    showSwitches();
    draw();
  } catch (error) {
    showState(error.message);
  }
  setTimeout(poll, document.hidden ? 2000 : 500);
}

async function showModel() {
  try {
    const response = await call("/v1/models", {headers: headers()}), data = await response.json();
    const model = data.data[0], theirs = model.default_sampling_params;
    $("model").textContent = `${model.id}, ${model.max_model_len.toLocaleString("en")} tokens of context`;
    // What the model's authors recommend; where they say nothing, what suits most chat models.
    const fallback = Object.keys(theirs).some(name => name !== "max_tokens") ? {temperature: 1, top_p: 1, top_k: 0, min_p: 0} : {temperature: 0.7, top_p: 0.95, top_k: 40, min_p: 0.05};
    for (const [name, value] of Object.entries({...fallback, ...theirs})) {
      const input = $(name);
      if (input && !input.dataset.touched) input.value = +value.toFixed(4);
    }
  } catch (error) {
    if (error.status) $("model").textContent = error.message;  // else poll() shows that the server is away
    if (error.status === 401) $("more").open = true;
    setTimeout(showModel, 2000);
  }
}

$("key").addEventListener("change", showModel);
keepSettings();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("resize", draw);
addEventListener("storage", event => { if (event.key === storeKey || event.key === null) takeOthers(); });
store.load();
current = store.create();
showConversation();
showModel();
poll();
