// The conversation that is shown: sending, stopping, editing, asking again, comparing.
let current = null;
let abort = null;

function bubble(role, who) {
  const el = document.createElement("div");
  el.className = "msg " + role;
  for (const part of ["who", "body", "meta", "tools"]) {
    const child = document.createElement("div");
    child.className = part;
    el.append(child);
  }
  el.querySelector(".who").textContent = who;
  el.querySelector(".body").dir = "auto";  // Arabic and Hebrew from the right
  return el;
}

function scrollDown() { $("log").scrollTop = $("log").scrollHeight; }

// Does it, and stays at the end of the conversation where that is what is looked at.
function following(change) {
  const log = $("log"), follow = log.scrollHeight - log.scrollTop - log.clientHeight < 120;
  change();
  if (follow) scrollDown();
}

function fault(text) {
  const el = document.createElement("div");
  el.className = "fault";
  el.textContent = text;
  return el;
}

function thoughts() {
  const box = document.createElement("details"), label = document.createElement("summary"), body = document.createElement("div");
  label.textContent = "Thoughts";
  body.className = "thoughts";
  body.dir = "auto";
  box.append(label, body);
  return box;
}

// The parts of one answer; kept where they are when more of it comes.
function showAnswer(el, message) {
  const body = el.querySelector(".body");
  if (message.pair) return showPair(el, message);
  const text = document.createElement("div");
  text.className = "text";
  text.dir = "auto";
  showText(text, message.content);
  let box = body.querySelector(":scope > details");
  for (const child of [...body.children]) if (child !== box) child.remove();
  if (message.thoughts && !box) {
    box = thoughts();
    box.open = !message.content && !message.meta;
    body.append(box);
  }
  if (box) box.querySelector(".thoughts").textContent = message.thoughts;
  body.append(text);
  if (message.fault) body.append(fault(message.fault));
  el.classList.toggle("error", Boolean(message.fault));
  showMeta(el.querySelector(".meta"), message.meta);
}

// `text` into `element`, with a mark where it has `token` at `place`; whether it has.
function showMarked(element, text, place, token) {
  const has = token !== undefined && place >= 0 && text.slice(place, place + token.length) === token;
  element.textContent = text;
  if (!has) return false;
  const mark = document.createElement("mark");
  mark.textContent = token;
  mark.title = "the first token that differs";
  element.replaceChildren(text.slice(0, place), mark, text.slice(place + token.length));
  return true;
}

function showPair(el, message) {
  el.classList.add("compare");
  const [a, b] = message.pair, at = firstDifference(a.tokens, b.tokens);
  const ended = message.pair.every(one => one.meta || one.fault);
  // While one is ahead of the other, the end of the shorter is no difference.
  const parted = at.token >= 0 && (ended || at.token < Math.min(a.tokens.length, b.tokens.length));
  const pair = document.createElement("div"), before = el.querySelectorAll(".pair > div");
  pair.className = "pair";
  for (const [i, one] of message.pair.entries()) {
    const side = document.createElement("div"), title = document.createElement("h3"), text = document.createElement("div"), meta = document.createElement("div");
    title.textContent = one.precision === "exact" ? "FP16" : "FP8";
    text.className = "plain";
    text.dir = "auto";
    meta.className = "meta";
    showMeta(meta, one.meta);
    side.append(title);
    // Tokens are those of thoughts, of the marks around them and of what is behind.
    const written = one.tokens.join(""), token = parted ? one.tokens[at.token] : undefined;
    let from = 0;
    if (one.thoughts) {
      const box = thoughts(), was = before[i]?.querySelector("details"), place = Math.max(written.indexOf(one.thoughts), 0);
      const here = showMarked(box.querySelector(".thoughts"), one.thoughts, at.length - place, token);
      box.open = (here && !was?.querySelector("mark")) || (was?.open ?? !one.content);
      side.append(box);
      from = place + one.thoughts.length;
    }
    showMarked(text, one.content, at.length - Math.max(written.indexOf(one.content, from), from), token);
    side.append(text);
    if (one.fault) side.append(fault(one.fault));
    side.append(meta);
    pair.append(side);
  }
  el.querySelector(".body").replaceChildren(pair);
  const same = ended && at.token < 0 ? "The two answers are the same." : "";
  el.querySelector(":scope > .meta").textContent =
    parted ? `They differ first at token ${at.token + 1}: ${JSON.stringify(a.tokens[at.token] ?? "(end)")} in FP16, ${JSON.stringify(b.tokens[at.token] ?? "(end)")} in FP8.` : same;
}

function tools(el, ...buttons) { el.querySelector(".tools").replaceChildren(...buttons); }

function draw_message(index) {
  const message = current.messages[index];
  if (message.role === "user") {
    const el = bubble("user", "you");
    el.querySelector(".body").textContent = message.content;
    tools(el, ...versionButtons(index), copyButton("Copy", () => message.content), button("Edit", () => edit(index, el)));
    return el;
  }
  const el = bubble("assistant", "model");
  showAnswer(el, message);
  answerTools(el, index);
  return el;
}

function answerTools(el, index) {
  const message = current.messages[index];
  tools(el, ...versionButtons(index), copyButton("Copy", () => message.pair ? message.pair.map(p => p.content).join("\n\n") : message.content), button("Regenerate", () => again(index)));
}

function showConversation() {
  $("log").replaceChildren(...current.messages.map((_, i) => draw_message(i)));
  if (!current.messages.length) {
    const hint = document.createElement("p");
    hint.className = "empty";
    hint.textContent = "Write a message below. Enter sends, Shift+Enter starts a new line, Escape stops an answer.";
    $("log").append(hint);
  }
  scrollDown();
  listConversations();
}

function listConversations() {
  const list = $("conversations");
  list.replaceChildren(...store.all.filter(c => c.messages.length).map(one => {
    const item = document.createElement("li"), open = button(one.title || "(empty)", () => openConversation(one)), drop = button("×", () => forget(one));
    open.className = "open";
    if (one === current) open.setAttribute("aria-current", "true");
    drop.className = "drop";
    drop.setAttribute("aria-label", `Delete "${one.title}"`);
    item.append(open, drop);
    return item;
  }));
}

function openConversation(one) {
  if (one !== current) {
    if (abort) abort.abort();
    current = one;
    showConversation();
  }
  showTab("chat");
  $("input").focus();
}

// What other tabs keep is there beside what this one does, and not lost when it saves.
function takeOthers() {
  store.load();
  const theirs = store.all.find(one => one.id === current.id), order = theirs ? later(theirs, current) : 0;
  if (order > 0 && !abort && !$("log").querySelector("textarea")) {  // the conversation went on there
    current = theirs;
    return showConversation();
  }
  if (order > 0) {  // in both tabs at once: from here on these are two
    current.id = store.newId();
    store.all = [current, ...store.all];
  } else {
    store.all = store.all.map(one => one === theirs ? current : one);
  }
  if (order !== 0) store.save();  // below 0: saved before the last of this tab's was seen there
  listConversations();
}

function forget(one) {
  if (!confirm(`Delete "${one.title}"?`)) return;
  const drops = () => [...$("conversations").querySelectorAll(".drop")], place = drops().indexOf(document.activeElement);
  if (one === current && abort) abort.abort();
  store.drop(one);
  if (one === current) {
    current = store.create();
    showConversation();
  } else {  // an answer that is coming stays where it is shown
    listConversations();
  }
  if (place >= 0) (drops()[place] || drops().pop() || $("new")).focus();
}

// The conversation as the server is told it: without what failed, and of a pair the FP16 answer.
function history(messages) {
  const told = $("system").value ? [{role: "system", content: $("system").value}] : [];
  const content = m => m.pair ? m.pair[0].content : m.content;
  for (const [i, m] of messages.entries()) {
    // Many templates want turns to alternate: a question without an answer is left out with it.
    const unanswered = m.role === "user" && i + 1 < messages.length && !content(messages[i + 1]);
    if (!unanswered && (m.role === "user" || content(m))) told.push({role: m.role, content: content(m)});
  }
  return told;
}

async function answer(versions) {
  const conversation = current, compare = $("precision").value === "compare";
  const message = {role: "assistant", content: "", versions};
  if (compare) message.pair = ["exact", "fast"].map(precision => ({precision, tokens: [], content: ""}));
  const body = {...settings(), messages: history(conversation.messages)};
  const index = conversation.messages.push(message) - 1;
  const el = bubble("assistant", "model");
  $("log").append(el);
  scrollDown();
  const mine = abort = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  tell("the model answers");
  const keep = () => {  // what has come, where the page is left or loaded again
    for (const one of message.pair || [message]) one.meta ||= "stopped";
    if (store.all.includes(conversation)) store.touch(conversation);
  };
  addEventListener("pagehide", keep);
  let waiting = false;
  const changed = () => {  // once a frame, however many pieces come
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      following(() => showAnswer(el, message));
    });
  };
  if (compare) {
    // The same random numbers for both.
    if (body.seed === undefined) body.seed = Math.floor(Math.random() * 2 ** 31);
    // One after the other: in a step together with the exact one, the fast one would get FP16 as well. And each with
    // prefixes of its own: what was computed for others, or for the other side, may be of either precision.
    for (const one of message.pair) if (!mine.signal.aborted) await ask({...body, precision: one.precision, cache_salt: "compare, " + one.precision, logprobs: true}, mine.signal, one, changed);
    message.content = message.pair[0].content;
  } else {
    await ask({...body, precision: $("precision").value}, mine.signal, message, changed);
  }
  following(() => {
    showAnswer(el, message);
    if (current === conversation && current.messages[index] === message) answerTools(el, index);
  });
  removeEventListener("pagehide", keep);
  if (abort === mine) {
    abort = null;
    $("send").disabled = false;
    $("stop").disabled = true;
  }
  if (store.all.includes(conversation)) store.touch(conversation);
  listConversations();
  if (current !== conversation) return;
  const failed = message.fault || message.pair?.find(one => one.fault)?.fault;
  tell(failed ? "failed: " + failed : message.meta === "stopped" ? "stopped" : "answer: " + message.content.slice(0, 500));
  if (document.activeElement === document.body || document.activeElement === $("stop")) $("input").focus();
}

function send(text, versions) {
  current.messages.push({role: "user", content: text, versions});
  store.touch(current);
  showConversation();
  answer();
}

// Takes this message and what follows out of the conversation and keeps it, as one of the message's versions: {at, all},
// where all[at] is null in place of what the conversation has.
function leave(index) {
  if (abort) abort.abort();
  const left = current.messages.splice(index), versions = left[0].versions || {at: 0, all: [null]};
  delete left[0].versions;
  versions.all[versions.at] = left;
  return versions;
}

// A new version of this message is to come.
function rewind(index) {
  const {all} = leave(index);
  return {at: all.push(null) - 1, all};
}

function again(index) {
  const versions = rewind(index);
  showConversation();
  answer(versions);
}

// The conversation as it went on in the version `step` further.
function showVersion(index, step) {
  const {at, all} = leave(index), to = at + step;
  current.messages.push(...all[to]);
  all[to] = null;
  current.messages[index].versions = {at: to, all};
  store.touch(current);
  showConversation();
  const shown = $("log").children[index], buttons = [...shown.querySelectorAll(".version")];
  shown.scrollIntoView({block: "nearest"});
  if (step > 0) buttons.reverse();
  buttons.find(one => !one.disabled).focus({preventScroll: true});
  tell(`version ${to + 1} of ${all.length}`);
}

function versionButtons(index) {
  const versions = current.messages[index].versions;
  if (!versions) return [];
  const {at, all} = versions, place = document.createElement("span");
  place.textContent = `${at + 1} / ${all.length}`;
  const move = (sign, name, step) => {
    const b = button(sign, () => showVersion(index, step));
    b.className = "version";
    b.setAttribute("aria-label", name);
    b.disabled = !all[at + step];
    return b;
  };
  return [move("‹", "Previous version", -1), place, move("›", "Next version", 1)];
}

function edit(index, el) {
  const area = document.createElement("textarea");
  area.value = current.messages[index].content;
  area.setAttribute("aria-label", "Edited message");
  const done = () => {
    const text = area.value.trim();
    if (!text) return;
    send(text, rewind(index));
    $("input").focus();
  };
  const cancel = () => {
    const shown = draw_message(index);
    el.replaceWith(shown);
    shown.querySelector(".tools").lastChild.focus();
  };
  area.addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) event.preventDefault(), done();
    if (event.key === "Escape") event.stopPropagation(), cancel();
  });
  el.querySelector(".body").replaceChildren(area);
  tools(el, button("Send edited", done), button("Cancel", cancel));
  area.focus();
}

const tabs = ["chat", "saved", "load", "settings"];
function showTab(name) {
  document.body.dataset.tab = name;
  for (const one of tabs) {
    $("tab_" + one).setAttribute("aria-selected", String(one === name));
    $("tab_" + one).tabIndex = one === name ? 0 : -1;
  }
  draw();
}
for (const name of tabs) {
  $("tab_" + name).addEventListener("click", () => showTab(name));
  $("tab_" + name).addEventListener("keydown", event => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(name) + step + tabs.length) % tabs.length];
    showTab(next);
    $("tab_" + next).focus();
  });
}

$("form").addEventListener("submit", event => {
  event.preventDefault();
  const text = $("input").value.trim();
  if (!text || abort) return;
  $("input").value = "";
  send(text);
});
$("input").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
document.addEventListener("keydown", event => { if (event.key === "Escape" && !event.isComposing && abort) abort.abort(); });
$("stop").addEventListener("click", () => abort && abort.abort());
$("new").addEventListener("click", () => openConversation(store.create()));
$("forget").addEventListener("click", () => {
  if (!confirm("Delete all conversations that this browser keeps?")) return;
  if (abort) abort.abort();
  store.all = [];
  store.save();
  openConversation(store.create());
});
