// Conversations, in this browser's own store: [{id, title, changed, messages}], the one used last first. A message is
// {role, content} and for answers also {thoughts, meta, fault, pair: [{precision, tokens, content, meta, fault}]}. One that
// was edited or answered anew has versions: {at, all: [messages from there on, or null at `at`]}.
const $ = id => document.getElementById(id);
// The page may lie under a proxy's path.
const base = location.pathname.replace(/\/$/, "");
const storeKey = "nestedfp:" + base;
const mostKept = 200;

const store = {
  all: [],
  load() {
    try {
      const kept = JSON.parse(localStorage.getItem(storeKey) || "[]");
      this.all = Array.isArray(kept) ? kept.filter(c => c && typeof c.id === "string" && Array.isArray(c.messages)) : [];
    } catch {
      this.all = [];
    }
  },
  save() {
    this.all.length = Math.min(this.all.length, mostKept);
    for (;;) {
      try {
        return localStorage.setItem(storeKey, JSON.stringify(this.all.filter(c => c.messages.length)));
      } catch {  // no room: the oldest goes. A browser that keeps nothing at all lets the page work without
        if (this.all.length < 2) return;
        this.all.pop();
      }
    }
  },
  newId() { return Date.now().toString(36) + Math.random().toString(36).slice(2, 8); },
  create() {
    const one = {id: this.newId(), title: "", messages: []};
    this.all = [one, ...this.all.filter(c => c.messages.length)];
    return one;
  },
  touch(one) {
    this.all = [one, ...this.all.filter(c => c !== one)];
    one.changed = Date.now();
    const first = one.messages.find(m => m.role === "user");
    one.title = first ? first.content.replace(/\s+/g, " ").slice(0, 60) : "";
    this.save();
  },
  drop(one) {
    this.all = this.all.filter(c => c !== one);
    this.save();
  },
};

// Above 0 where a is a later state of a conversation than b.
function later(a, b) { return (a.changed || 0) - (b.changed || 0) || a.messages.length - b.messages.length; }

function tell(text) { $("told").textContent = text; }  // to screen readers
