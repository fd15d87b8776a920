#!/usr/bin/env python3
"""Keeps src/config/models.toml, the table of facts about models that ships with axed.

  tests/models_table.py stale              lists the entries that were checked more than 90 days ago (exit 1 if any)
  tests/models_table.py soon               warns of models in shipped files that end within 60 days
  tests/models_table.py gather FILE        prints a new table from LiteLLM's model_prices_and_context_window_backup.json,
                                           which its package on PyPI carries
"""

import datetime
import json
import pathlib
import re
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "src/config/models.toml"
MAX_AGE = datetime.timedelta(days=90)
NOTICE = datetime.timedelta(days=60)
# How long the table keeps a model after its end, so that its users are warned.
GONE = datetime.timedelta(days=180)
# What users see: without tests of ours, whose models may be old.
SHIPPED = ["README.md", "docs", "agents", "config", "deploy", "clients", "src/catalog/template.rs", "src/web/openapi", "src/cli", "tests/guide", "*compose*"]
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
# The tiers of a service that cost another share of the price, by their suffix there.
TIERS = (("batch", "_batches"), ("flex", "_flex"), ("priority", "_priority"), ("ultrafast", "_ultrafast"))
# Levels of effort that LiteLLM's table does not have, by provider and the beginning of the model's name: from the
# services' own pages. The first match holds.
EFFORT_LEVELS = [
    ("gemini", "gemini-2.5-pro", ["minimal", "low", "medium", "high"]),
    ("gemini", "gemini-2.5", ["none", "minimal", "low", "medium", "high"]),
    ("gemini", "gemini-3.1-pro", ["low", "medium", "high"]),
    ("gemini", "gemini-pro", ["low", "medium", "high"]),
    ("gemini", "gemini-3.7-flash", ["low", "medium", "high"]),
    ("gemini", "gemini-3.8-flash", ["low", "medium", "high"]),
    ("gemini", "gemini-flash-lite", ["minimal", "low", "medium", "high"]),
    ("gemini", "gemini-flash", ["low", "medium", "high"]),
    ("gemini", "gemini-3", ["minimal", "low", "medium", "high"]),
    ("gemini", "gemini-4-hydrogen", ["low", "medium", "high", "xhigh"]),
    ("gemini", "gemini-4", ["low", "medium", "high"]),
    ("xai", "grok-4.20-multi-agent", ["low", "medium", "high", "xhigh"]),
    ("xai", "grok-4.20", []),
    ("xai", "grok-4.3", ["none", "low", "medium", "high"]),
    ("xai", "grok-4", ["low", "medium", "high"]),
    ("xai", "grok-build-0", []),
    ("xai", "grok-build", ["low", "medium", "high"]),
    ("xai", "grok-code", []),
    ("deepseek", "deepseek-v4", ["low", "high", "max"]),
    ("deepseek", "deepseek-flash", ["low", "high", "max"]),
    ("deepseek", "", []),
    ("groq", "openai/gpt-oss", ["low", "medium", "high"]),
    # It takes "none" and "default" only.
    ("groq", "qwen/", []),
    ("cerebras", "gpt-oss", ["low", "medium", "high"]),
    ("cerebras", "qwen-3.8", ["none", "low", "medium", "high"]),
    ("cerebras", "gemma-4", ["low", "medium", "high"]),
    ("mistral", "magistral", []),
    ("together", "openai/gpt-oss", ["low", "medium", "high"]),
]
# What LiteLLM's table lacks or has otherwise than the services' own pages: keys that replace its own.
CORRECTIONS = {
    "gpt-5.6": {"supports_max_reasoning_effort": True},
    "gpt-5.6-sol": {"supports_max_reasoning_effort": True},
    "gpt-5.6-terra": {"supports_max_reasoning_effort": True},
    "gpt-5.6-luna": {"supports_max_reasoning_effort": True},
    "claude-mythos-preview": {"successor_model": "claude-mythos-5-2"},
    "gpt-5-chat": {"successor_model": "gpt-6-sol"},
    # What one request gets without continuing it.
    "gemini/gemini-4-argon": {"max_output_tokens": 65536},
    "gemini/gemini-4-hydrogen": {"max_output_tokens": 65536},
    "mistral/mistral-large-4": {"max_output_tokens": 262144},
    "mistral/mistral-large-4-0": {"max_output_tokens": 262144},
    # Their window, not the limit of their input.
    **{name: {"max_input_tokens": 922000} for name in ("gpt-5.4", "gpt-5.4-pro", "gpt-5.5", "gpt-5.5-pro")},
}
# Prices from a day on.
PRICE_CHANGES = {
    **{
        f"gemini-{name}": [{"from": "2027-01-01", "input": 1.5, "output": 7.5, "cache_read": 0.15}]
        for name in ("3.6-flash", "3.7-flash", "3.8-flash", "flash")
    },
    "gemini-4-argon": [{"from": "2026-12-01", "input": 4, "output": 20, "cache_read": 0.2}],
}
# Models that LiteLLM's table does not have: the model that they are like, and what differs.
ADDED = {
    "claude-fable-5-2": (
        "claude-fable-5-1",
        {
            "input_cost_per_token": 8e-6,
            "output_cost_per_token": 40e-6,
            "cache_read_input_token_cost": 0.2e-6,
            "cache_creation_input_token_cost": 10e-6,
            "cache_creation_input_token_cost_above_1hr": 16e-6,
            "input_cost_per_token_batches": 4e-6,
            "provider_specific_entry": {"us": 1.1, "fast": 2},
        },
    ),
    "claude-mythos-5-2": ("claude-fable-5-2", {}),
    "gpt-6.2-sol": ("gpt-6.1-sol", {"input_cost_per_token_ultrafast": 6e-6}),
    "gpt-6.2-astra": (
        "gpt-6-astra",
        {
            "input_cost_per_token": 8e-6,
            "output_cost_per_token": 40e-6,
            "cache_read_input_token_cost": 0.4e-6,
            "cache_creation_input_token_cost": 10e-6,
            "input_cost_per_token_above_272k_tokens": 16e-6,
            "output_cost_per_token_above_272k_tokens": 60e-6,
            "cache_read_input_token_cost_above_272k_tokens": 0.8e-6,
            "cache_creation_input_token_cost_above_272k_tokens": 20e-6,
            "input_cost_per_token_batches": 4e-6,
            "input_cost_per_token_flex": 4e-6,
            "input_cost_per_token_priority": 16e-6,
            "input_cost_per_token_ultrafast": None,
        },
    ),
}
# Retired at Anthropic, and still served by others: prices, window, longest reply, last day, successor.
RETIRED_CLAUDES = {
    "claude-opus-4-1": (15, 75, 200_000, 32_000, "2026-08-05", "claude-opus-5-5"),
    "claude-opus-4": (15, 75, 200_000, 32_000, "2026-06-15", "claude-opus-5-5"),
    "claude-sonnet-4": (3, 15, 200_000, 64_000, "2026-06-15", "claude-sonnet-5-5"),
    "claude-3-7-sonnet": (3, 15, 200_000, 64_000, "2026-02-19", "claude-sonnet-5-5"),
    "claude-3-5-haiku": (0.8, 4, 200_000, 8_192, "2026-02-19", "claude-haiku-5-5"),
    "claude-3-haiku": (0.25, 1.25, 200_000, 4_096, "2026-04-20", "claude-haiku-5-5"),
}


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
    for service, start, levels in EFFORT_LEVELS:
        if service == provider and name.startswith(start):
            return levels
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


def windows(provider, name, facts):
    """LiteLLM's `max_input_tokens` is a limit of the input for some models, and the whole window for others."""
    limit, reply = facts.get("max_input_tokens"), facts.get("max_output_tokens")
    # From Gemini 4 on, the limit is for a request and its reply together.
    if provider == "gemini" and not name.startswith("gemini-4"):
        return {"max_input": limit}
    # A reply of GPT-5 and later has its own part of the window.
    if provider == "openai" and re.match(r"gpt-([5-9]|\d\d)", name) and name != "gpt-5-pro":
        return {"context_window": limit + reply, "max_input": limit}
    return {"context_window": limit}


def table(values):
    parts = [f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {number(value)}" for key, value in values.items()]
    return "{ " + ", ".join(parts) + " }"


def entry(provider, prefix, name, facts, names, today):
    """A model's lines. A successor is named if it is one of the `names` in the table."""
    lines = [f'checked = "{today}"']
    if gone := facts.get("deprecation_date"):
        lines.append(f'retires = "{gone}"')
        if (successor := facts.get("successor_model", "").removeprefix(prefix)) in names:
            lines.append(f'successor = "{successor}"')
    for key, value in prices(facts).items():
        lines.append(f"{key} = {number(value)}")
    if long := long_context(facts):
        lines.append(f"long = {table(long)}")
    if changes := PRICE_CHANGES.get(name.removesuffix("-latest")):
        lines.append("prices = [" + ", ".join(table(change) for change in changes) + "]")
    special = facts.get("provider_specific_entry") or {}
    for key, suffix in TIERS:
        part = special.get("fast") if key == "priority" and provider == "anthropic" else share(facts, suffix)
        if key == "flex" and provider == "groq":
            # It sells more requests in a minute at the same price.
            part = 1
        if part:
            lines.append(f"{key} = {number(part)}")
    if regional := special.get("us") or facts.get("regional_processing_uplift_multiplier_eu"):
        lines.append(f"regional = {number(regional)}")
    for key, value in windows(provider, name, facts).items():
        lines.append(f"{key} = {int(value)}")
    if facts.get("max_output_tokens"):
        lines.append(f"max_output = {int(facts['max_output_tokens'])}")
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
        if facts.get("supports_forced_tool_use") is False:
            lines.append("forced_tools = false")
    if provider == "openai" and wants_responses(name, facts):
        lines.append("responses = true")
    return lines


def supplemented(source):
    """LiteLLM's table with the corrections and additions of this script."""
    for name, keys in CORRECTIONS.items():
        source[name] = {**source[name], **keys}
    for name, (like, keys) in ADDED.items():
        # What LiteLLM's table has by now is not replaced.
        source.setdefault(name, {**source[like], **keys})
    for name, (cost, reply_cost, window, reply, gone, successor) in RETIRED_CLAUDES.items():
        facts = {
            "litellm_provider": "anthropic",
            "mode": "chat",
            "input_cost_per_token": cost / 1e6,
            "output_cost_per_token": reply_cost / 1e6,
            "cache_read_input_token_cost": cost / 1e7,
            "cache_creation_input_token_cost": cost * 1.25 / 1e6,
            "cache_creation_input_token_cost_above_1hr": cost * 2 / 1e6,
            "input_cost_per_token_batches": cost / 2e6,
            "max_input_tokens": window,
            "max_output_tokens": reply,
            "supports_vision": True,
            "supports_pdf_input": name != "claude-3-haiku",
            "deprecation_date": gone,
            "successor_model": successor,
        }
        source.setdefault(name, facts)
    return source


def gather(path):
    source = supplemented(json.loads(pathlib.Path(path).read_text()))
    today = datetime.date.today()
    defaults = tomllib.loads(TABLE.read_text())["defaults"]
    print(
        "# Facts about models, gathered from public sources: LiteLLM's table, which quotes the services' own pages, and those\n"
        "# pages. Prices are in USD per million tokens for the usual service tier; `long` has those above a length, `prices` those\n"
        "# from a day on, and `batch`, `flex`, `priority` (the fast tier), `ultrafast` and `regional` the factor for requests of\n"
        "# that kind. `context_window` is for a request and its reply together, `max_input` for the request. A model that ends has\n"
        "# its last day in `retires`, and what replaces it in `successor`.\n"
        "# A date or `-latest` at the end of a model's name is left off before it is looked up here.\n"
        '# The configuration overrides each key: [models] file, [providers.<name>.models."<model>"], [prices."<provider/model>"].\n'
        "# `tests/models_table.py stale` lists the entries that were checked more than 90 days ago.\n"
    )
    print(f'as_of = "{today}"')
    print("# The models of templates and examples.")
    print("defaults = [" + ", ".join(f'"{name}"' for name in defaults) + "]")
    for ours, theirs, prefix in PROVIDERS:
        rows = {}
        for key, facts in sorted(source.items()):
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
            # Others serve a retired Claude for longer.
            if gone and datetime.date.fromisoformat(gone) <= today - GONE and ours != "anthropic":
                continue
            if name.endswith("-latest") and key.removesuffix("-latest") in source:
                continue
            rows[name.removesuffix("-latest")] = facts
        for name, facts in rows.items():
            print(f'\n[{ours}."{name}"]')
            print("\n".join(entry(ours, prefix, name, facts, rows, today)))


def shipped():
    """The files that users see, with the models that they name."""
    listed = subprocess.run(["git", "ls-files", *SHIPPED], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    services = "|".join(re.escape(name) for name in services_of_table())
    named = re.compile(rf"\b(?:({services})/)([A-Za-z0-9][\w.:/-]*\w)|\b((?:claude|gpt|gemini|grok)-[\w.-]*\w)")
    for file in listed.split():
        if file == "src/config/models.toml":
            continue
        for index, line in enumerate((ROOT / file).read_text(errors="replace").splitlines(), 1):
            for match in named.finditer(line):
                yield f"{file}:{index}", match[1], match[2] or match[3]


def services_of_table():
    return [name for name, rows in tomllib.loads(TABLE.read_text()).items() if isinstance(rows, dict)]


def soon():
    """Prints a warning for each shipped model that ends soon by the calendar. Never fails: main stays green without a commit."""
    rows = {name: facts for models in tomllib.loads(TABLE.read_text()).values() if isinstance(models, dict) for name, facts in models.items()}
    today = datetime.date.today()
    for place, _, model in shipped():
        gone = rows.get(model, {}).get("retires")
        if gone and datetime.date.fromisoformat(gone) - today < NOTICE:
            print(f"warning: {place} names {model}, which ends on {gone}; use {rows[model].get('successor', 'another')}")
    stale()


def stale():
    rows = tomllib.loads(TABLE.read_text())
    today = datetime.date.today()
    models_of = {name: models for name, models in rows.items() if isinstance(models, dict)}
    old = [
        f"{provider}/{model} (checked {facts['checked']})"
        for provider, models in models_of.items()
        for model, facts in models.items()
        if today - datetime.date.fromisoformat(facts["checked"]) > MAX_AGE
    ]
    for line in old:
        print(line)
    total = sum(len(models) for models in models_of.values())
    print(f"{len(old)} of {total} entries were checked more than {MAX_AGE.days} days ago", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["stale"]:
            sys.exit(stale())
        case ["gather", path]:
            gather(path)
        case ["soon"]:
            soon()
        case _:
            sys.exit(__doc__)
