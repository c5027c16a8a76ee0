"""Random conversations through the chat templates of well-known models: nfp_render against jinja2.

usage: conversations_test.py NFP_RENDER TEMPLATE_FOLDER [CASES_PER_TEMPLATE] [SEED]
"""

import pathlib
import random
import sys

import oracle

TEXTS = ["Hello", "  What's \"2 + 2\"?\n", "", "Zażółć gęślą jaźń", "日本語のテキスト", "🙂👩‍👩‍👧 é", "<b>&amp; 'x' > \"y\"</b>",
         "a\tb\\n\r\nc", "\u00a0nbsp\u2028sep\u3000", "<tool_response>\nx\n</tool_response>", "{{ not a tag }} {% raw %}",
         "<think>\nLet me see.\n</think>\n\nFour.", "</think>x<think>", "\x00\x7f\x1b", "line\n\n\nline", "İstanbul ßΣ"]
ROLES = ["user", "assistant", "system", "tool", "ipython", "developer", "tool_results"]


class Conversations:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.strange = False  # whether the conversation at hand may hold what templates refuse

    def text(self):
        return "".join(self.random.choices(TEXTS, k=self.random.choice([1, 1, 1, 2, 3])))

    def json_value(self, depth=0):
        r = self.random
        kind = r.randrange(8 if depth < 3 else 6)
        if kind == 0:
            return r.choice([True, False, None])
        if kind == 1:
            return r.choice([0, 1, -7, 10**12, 2**63, 2**64 - 1])
        if kind == 2:
            return r.choice([0.5, -1e-7, 1e22, 3.0, 0.1, 1e16, 123456789.125])
        if kind < 6:
            return self.text()
        if kind == 6:
            return [self.json_value(depth + 1) for _ in range(r.randrange(3))]
        return {self.text() or "k": self.json_value(depth + 1) for _ in range(r.randrange(3))}

    def content(self):
        if not self.strange:
            return self.text()
        r = self.random.random()
        if r < 0.86:
            return self.text()
        if r < 0.9:
            return None
        if r < 0.92:
            return {"content": self.text()}
        parts = [{"type": "text", "text": self.text()}, {"type": "image"}, {"type": "text", "text": self.text()}]
        return parts[: self.random.randrange(4)]

    def schema(self, depth=0):
        """The JSON schema of one parameter."""
        r = self.random
        kind = r.choice(["string", "number", "integer", "boolean", "array", "object", ["string", "null"]])
        schema = {"type": kind, "description": self.text()}
        if kind == "array" and depth < 2:
            schema["items"] = self.schema(depth + 1)
        if kind == "object" and depth < 2:
            schema[r.choice(["additionalProperties", "properties"])] = self.schema(depth + 1)
        if r.random() < 0.2:
            schema["enum"] = [self.text(), self.text()]
        if r.random() < 0.2:
            schema["default"] = self.json_value()
        return schema

    def tool(self):
        name = self.random.choice(["get_weather", "search", "run\"it\"", "wolfram_alpha"])
        function = {"name": name, "description": self.text(),
                    "parameters": {"type": "object", "required": ["x"],
                                   "properties": {self.random.choice(["x", "city", "Größe"]): self.schema()
                                                  for _ in range(self.random.randrange(3))}}}
        if self.random.random() < 0.2:
            function["return"] = {"type": "string"}
        if self.random.random() < 0.2:
            function["strict"] = self.json_value()
        return {"type": "function", "function": function}

    def tool_call(self):
        r = self.random
        if r.random() < 0.3:
            arguments = '{"x": "y"}'
        else:
            arguments = {r.choice(["x", "query"]): self.text() if r.random() < 0.7 else self.json_value()
                         for _ in range(r.randrange(3))}
        call = {"type": "function", "function": {"name": r.choice(["search", "brave_search", "f"]),
                                                 "arguments": arguments}}
        if r.random() < 0.9:
            call["id"] = "abc123XYZ" if r.random() < 0.9 else "call_1"
        return call if r.random() < 0.95 else call["function"]

    def message(self, role):
        r = self.random
        message = {"role": role, "content": self.content()}
        if role == "assistant" and r.random() < 0.3:
            message["tool_calls"] = [self.tool_call() for _ in range(r.choice([1, 1, 1, 2, 0]) if self.strange else 1)]
            if r.random() < 0.5:
                message["content"] = r.choice([None, "", self.text()]) if self.strange else ""
            if self.strange and r.random() < 0.1:
                del message["content"]
            if self.strange and r.random() < 0.1:
                message["tool_calls"] = None
        if role == "assistant" and r.random() < 0.1:
            message["reasoning_content"] = r.choice([None, self.text()])
        if role in ("tool", "tool_results") and r.random() < 0.9:
            message["tool_call_id"] = "abc123XYZ"
        if role == "system" and r.random() < 0.1:
            message["tools"] = self.text()
        return message

    def messages(self):
        r = self.random
        self.strange = r.random() < 0.4
        if r.random() < 0.1:  # anything goes
            return [self.message(r.choice(ROLES)) for _ in range(r.randrange(6))]
        messages = [self.message("system")] if r.random() < 0.5 else []
        for _ in range(r.randrange(1, 5)):
            messages.append(self.message("user"))
            if self.strange and r.random() < 0.1:
                messages.append(self.message("user"))
            while r.random() < 0.9 or not self.strange:
                messages.append(self.message("assistant"))
                if not messages[-1].get("tool_calls"):
                    break
                messages += [self.message("tool") for _ in messages[-1]["tool_calls"]]
        return messages

    def case(self, template):
        r = self.random
        case = {"template": template, "messages": self.messages(), "add_generation_prompt": r.random() < 0.5}
        if r.random() < 0.9:
            case["bos_token"] = "<s>"
        if r.random() < 0.9:
            case["eos_token"] = "</s>"
        if r.random() < 0.4:
            case["tools"] = [self.tool() for _ in range(r.randrange(4))]
        extra = {}
        if r.random() < 0.2:
            extra["enable_thinking"] = r.choice([True, False, None])
        if r.random() < 0.2:
            extra["date_string"] = "1 Jan 2030"
        if r.random() < 0.1:
            extra["tools_in_user_message"] = False
        if r.random() < 0.1:
            extra["builtin_tools"] = ["brave_search", "code_interpreter", "wolfram_alpha"]
        if r.random() < 0.05:
            extra["custom_tools"] = [self.tool()]
        if extra:
            case["extra"] = extra
        return case


def main():
    program, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 100
    seed = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    templates = sorted(folder.glob("*.jinja"))
    if not templates:
        print(f"FAILED: no templates in {folder}")
        return 1
    different = 0
    for path in templates:
        source = path.read_bytes().decode()
        conversations = Conversations(f"{seed} {path.name}")
        different += oracle.compare(program, [conversations.case(source) for _ in range(count)], path.name)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
