#!/usr/bin/env python3
"""Keeps src/config/models.toml, the table of facts about models that ships with axed.

  tests/models_table.py stale              lists the entries that were checked more than 90 days ago (exit 1 if any)
  tests/models_table.py gather FILE        prints a new table from LiteLLM's model_prices_and_context_window_backup.json,
                                           which its package on PyPI carries
"""

import datetime
import json
import pathlib
import re
import sys
import tomllib

TABLE = pathlib.Path(__file__).resolve().parent.parent / "src/config/models.toml"
MAX_AGE = datetime.timedelta(days=90)
# Our provider's name, LiteLLM's name, and the prefix of its keys.
PROVIDERS = [
    ("anthropic", "anthropic", ""),
    ("openai", "openai", ""),
    ("gemini", "gemini", "gemini/"),
    ("xai", "xai", "xai/"),
    ("deepseek", "deepseek", "deepseek/"),
    ("mistral", "mistral", "mistral/"),
    ("groq", "groq", "groq/"),
    ("cerebras", "cerebras", "cerebras/"),
    ("together", "together_ai", "together_ai/"),
]
# Speech, search, fine-tuned and special-purpose models; dated names are found without their date.
SKIPPED = re.compile(
    r"^ft:|audio|search|deep-research|computer-use|guard|tts|lyria|voxtral|exp|robotics|gemma-2|learnlm|omni|codestral-mamba"
    r"|rosalind|cyber|daybreak|law$|chat-latest$|container|preview-|beta|-gv2|tiny|vibe-cli|mistral-code|together-ai-"
    r"|-20\d\d-?\d\d-?\d\d$|-20\d{6}$|-\d{4}$|^gpt-(3|4$|4-)|^o1|gemini-2\.0|gemini-1"
)
ONLY_TOGETHER = re.compile(r"(MiniMax-M3|Kimi-K[23]|GLM-5|DeepSeek-V4|Qwen3\.[78]|gpt-oss|Llama-3\.3)")
EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# They reject a request that makes them call a tool; the table does not say so.
DECIDE_ABOUT_TOOLS = {"claude-fable-5-1", "claude-mythos-5-1", "claude-opus-5-5"}


def million(price):
    return round(float(price) * 1e6, 6)


def number(value):
    return str(int(value)) if float(value) == int(value) else repr(value)


def prices(facts, suffix="", over=""):
    names = {
        "input": "input_cost_per_token",
        "output": "output_cost_per_token",
        "cache_read": "cache_read_input_token_cost",
        "cache_write": "cache_creation_input_token_cost",
        "cache_write_1h": "cache_creation_input_token_cost_above_1hr",
    }
    found = {}
    for ours, theirs in names.items():
        price = facts.get(theirs + over + suffix)
        if price:
            found[ours] = million(price)
    return found


def long_context(facts):
    """The prices above a length, where a model has them."""
    for key in facts:
        match = re.fullmatch(r"input_cost_per_token_above_(\d+)k_tokens", key)
        if match:
            found = prices(facts, over=f"_above_{match[1]}k_tokens")
            return {"above": int(match[1]) * 1000, **found}
    return None


def share(facts, suffix):
    """What a cheaper service tier costs, as a share of the price."""
    price, cheap = facts.get("input_cost_per_token"), facts.get("input_cost_per_token" + suffix)
    return round(cheap / price, 4) if price and cheap else None


def effort(provider, name, facts):
    """The levels that a model takes; [] for none; None where that is not known."""
    if levels := facts.get("reasoning_effort_levels"):
        return [level for level in EFFORTS if level in levels]
    if not facts.get("supports_reasoning"):
        return []
    if provider == "anthropic":
        if not (facts.get("supports_output_config") or facts.get("supports_adaptive_thinking")):
            return []
        levels = {"low", "medium", "high"}
        if not facts.get("thinking_always_on"):
            levels.add("none")
    elif provider == "openai":
        levels = {"low", "medium", "high"}
        if facts.get("supports_low_reasoning_effort") is False:
            levels.discard("low")
        if name == "gpt-5-pro":
            return ["high"]
    else:
        return None
    for level in ("none", "minimal", "xhigh", "max"):
        flag = facts.get(f"supports_{level}_reasoning_effort")
        if flag is True:
            levels.add(level)
        elif flag is False:
            levels.discard(level)
    return [level for level in EFFORTS if level in levels]


def sampling(provider, name, facts):
    """When a model takes temperature and top_p; None means always."""
    if facts.get("supports_sampling_params") is False:
        return "never"
    if provider == "openai" and facts.get("supports_reasoning"):
        return "without_effort" if facts.get("default_reasoning_effort") == "none" else "never"
    if provider == "anthropic" and facts.get("supports_adaptive_thinking"):
        return "without_effort"
    return None


def wants_responses(name, facts):
    """OpenAI's models from gpt-5.4 on refuse function tools on the chat wire when they reason."""
    if facts.get("mode") == "responses" or "/v1/chat/completions" not in facts.get("supported_endpoints", ["/v1/chat/completions"]):
        return True
    version = re.match(r"gpt-(\d+)(?:\.(\d+))?", name)
    return bool(version) and (int(version[1]), int(version[2] or 0)) >= (5, 4)


def entry(provider, name, facts, today):
    lines = [f'checked = "{today}"']
    for key, value in prices(facts).items():
        lines.append(f"{key} = {number(value)}")
    if long := long_context(facts):
        lines.append("long = { " + ", ".join(f"{key} = {number(value)}" for key, value in long.items()) + " }")
    for key, suffix in (("batch", "_batches"), ("flex", "_flex")):
        if part := share(facts, suffix):
            lines.append(f"{key} = {number(part)}")
    for key, theirs in (("context_window", "max_input_tokens"), ("max_output", "max_output_tokens")):
        if facts.get(theirs):
            lines.append(f"{key} = {int(facts[theirs])}")
    lines.append(f"images = {str(bool(facts.get('supports_vision'))).lower()}")
    lines.append(f"pdf = {str(bool(facts.get('supports_pdf_input'))).lower()}")
    lines.append(f"reasoning = {str(bool(facts.get('supports_reasoning'))).lower()}")
    if (levels := effort(provider, name, facts)) is not None:
        lines.append("effort = [" + ", ".join(f'"{level}"' for level in levels) + "]")
    if when := sampling(provider, name, facts):
        lines.append(f'sampling = "{when}"')
    if provider == "anthropic":
        lines.append(f"adaptive_thinking = {str(bool(facts.get('supports_adaptive_thinking'))).lower()}")
        lines.append(f"structured_output = {str(bool(facts.get('supports_native_structured_output'))).lower()}")
        if name in DECIDE_ABOUT_TOOLS:
            lines.append("forced_tools = false")
    if provider == "openai" and wants_responses(name, facts):
        lines.append("responses = true")
    return lines


def gather(path):
    table = json.loads(pathlib.Path(path).read_text())
    today = datetime.date.today()
    print(
        "# Facts about models, gathered from public sources: LiteLLM's table, which quotes the services' own pages. Prices are in\n"
        "# USD per million tokens for the usual service tier; `long` has those above a length, `batch` and `flex` the share of the\n"
        "# price that these tiers cost. A date or `-latest` at the end of a model's name is left off before it is looked up here.\n"
        '# The configuration overrides each key: [providers.<name>.models."<model>"], [prices."<provider/model>"].\n'
        "# `tests/models_table.py stale` lists the entries that were checked more than 90 days ago."
    )
    for ours, theirs, prefix in PROVIDERS:
        for key, facts in sorted(table.items()):
            if facts.get("litellm_provider") != theirs or facts.get("mode") not in ("chat", "responses"):
                continue
            if not key.startswith(prefix) or not facts.get("input_cost_per_token") or not facts.get("max_input_tokens"):
                continue
            name = key[len(prefix):]
            if SKIPPED.search(name) or (prefix == "" and "/" in name):
                continue
            if ours == "together" and not ONLY_TOGETHER.search(name):
                continue
            gone = facts.get("deprecation_date")
            if gone and datetime.date.fromisoformat(gone) <= today:
                continue
            if name.endswith("-latest") and key.removesuffix("-latest") in table:
                continue
            print(f'\n[{ours}."{name.removesuffix("-latest")}"]')
            print("\n".join(entry(ours, name, facts, today)))


def stale():
    table = tomllib.loads(TABLE.read_text())
    today = datetime.date.today()
    old = [
        f"{provider}/{model} (checked {facts['checked']})"
        for provider, models in table.items()
        for model, facts in models.items()
        if today - datetime.date.fromisoformat(facts["checked"]) > MAX_AGE
    ]
    for line in old:
        print(line)
    total = sum(len(models) for models in table.values())
    print(f"{len(old)} of {total} entries were checked more than {MAX_AGE.days} days ago", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["stale"]:
            sys.exit(stale())
        case ["gather", path]:
            gather(path)
        case _:
            sys.exit(__doc__)
