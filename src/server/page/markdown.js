// What the library lets through, as elements.
function sanitised(html, rules) {
  const template = document.createElement("template");
  template.innerHTML = DOMPurify.sanitize(html, rules);
  return template.content;
}

// The renderer takes quadratic time, and more, for some texts: emphasis, brackets, links or definitions that repeat
// thousands of times, a table's header of which each short line makes a row. The page would stand still meanwhile, so
// such a text is refused, and shown as it is.
const mostRendering = 500;  // ms
const refused = new Set();  // texts; what only adds to one is not tried again
let renderingEnds = 0;

function refuse(what) { throw new Error("too much work: " + what); }

function rendered(renderer, text) {
  for (const one of refused) if (text.startsWith(one)) refuse("as before");
  renderingEnds = performance.now() + mostRendering;
  try {
    const html = renderer.render(text);
    return html.length < 1000000 ? html : refuse("its HTML is too long");
  } catch (error) {
    refused.add(text);
    throw error;
  }
}

// Rules that match nothing and stop a rendering that takes too long. What one rule does by itself is bounded by counts.
function bound(renderer) {
  const inTime = () => performance.now() > renderingEnds ? refuse("time") : false;
  const cells = (state, line, end) => {
    const text = at => state.src.slice(state.bMarks[at], state.eMarks[at]);
    if (line + 1 >= end || !/^[-:|>\s]+$/.test(text(line + 1))) return;
    let last = line + 2;
    while (last < end && !state.isEmpty(last)) last++;
    if (text(line + 1).split("|").length * (last - line) > 20000) refuse("a table's cells");
  };
  renderer.block.ruler.before("table", "bound", (state, line, end) => cells(state, line, end) || inTime(),
                              {alt: ["paragraph", "reference", "blockquote", "list"]});
  renderer.inline.ruler.after("text", "bound", state => state.delimiters.length > 2000 ? refuse("emphasis") : inTime());
  const pretest = renderer.linkify.pretest;
  renderer.linkify.pretest = text => text.length > 4000 ? inTime() : inTime() || pretest.call(renderer.linkify, text);
}

// Markdown of an answer as elements. HTML in it is shown as text, what the renderer makes is sanitised, and no image is
// fetched. Where the libraries were not there when the program was built, answers are plain text.
const markdown = (() => {
  if (typeof window.markdownit !== "function" || !window.DOMPurify) return null;
  const renderer = window.markdownit({html: false, linkify: true, breaks: false}).disable("image");
  bound(renderer);
  const clean = html => sanitised(html, {
    ALLOW_DATA_ATTR: false, ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
    ALLOWED_TAGS: ["p", "br", "hr", "em", "strong", "s", "code", "pre", "a", "ul", "ol", "li", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td"],
    ALLOWED_ATTR: ["href", "class", "start"]});
  return text => {
    const part = clean(rendered(renderer, text));
    for (const link of part.querySelectorAll("a")) {
      link.target = "_blank";
      link.rel = "noopener noreferrer nofollow";
    }
    for (const pre of part.querySelectorAll("pre")) frameCode(pre);
    return part;
  };
})();

// Code as HTML, or null: the expressions of some languages take cubic time (C++'s for "a a a ..."), so that code is
// coloured a thousand characters of whole lines at a time, and not at all where a line is long or time is up.
function coloured(language, text) {
  const ends = performance.now() + mostRendering, parts = [""];
  for (const line of text.split(/(?<=\n)/)) {
    if (line.length > 2000) return null;
    if (parts.at(-1).length > 1000) parts.push("");
    parts.push(parts.pop() + line);
  }
  let html = "", state;
  for (const part of parts) {
    if (performance.now() > ends) return null;
    state = hljs.highlight(language, part, true, state?.top);
    html += state.value;
  }
  return html;
}

function frameCode(pre) {
  const code = pre.querySelector("code") || pre;
  const language = ((code.className || "").match(/language-([\w+#-]+)/) || [])[1] || "";
  const html = language && window.hljs && hljs.getLanguage(language) ? coloured(language, code.textContent) : null;
  if (html !== null) code.replaceChildren(sanitised(html, {ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"]}));
  const frame = document.createElement("div"), bar = document.createElement("div"), name = document.createElement("span");
  frame.className = "code";
  bar.className = "bar";
  name.textContent = language || "text";
  bar.append(name, copyButton("Copy code", () => code.textContent));
  pre.replaceWith(frame);
  pre.tabIndex = 0;  // so that the keyboard can scroll it
  frame.append(bar, pre);
}

function button(label, act) {
  const b = document.createElement("button");
  b.type = "button";
  b.textContent = label;
  b.addEventListener("click", () => act(b));
  return b;
}

function copyButton(label, text) {
  return button(label, async b => {
    let copied = true;
    try {
      await navigator.clipboard.writeText(text());
    } catch {  // a page that does not come over HTTPS or from this machine may not write there
      const area = document.createElement("textarea");
      area.value = text();
      document.body.append(area);
      area.select();
      copied = document.execCommand("copy");
      area.remove();
      b.focus();
    }
    b.textContent = copied ? "Copied" : "Not copied";
    tell(copied ? "copied" : "the browser does not let the page copy");
    setTimeout(() => { b.textContent = label; }, 1500);
  });
}

// `text` into `element`, as Markdown where that can be had.
function showText(element, text) {
  try {
    if (markdown) return element.replaceChildren(markdown(text));
  } catch (error) {
    console.warn("not shown as Markdown:", error);
  }
  element.classList.add("plain");
  element.textContent = text;
}
