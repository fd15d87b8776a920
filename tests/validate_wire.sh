#!/bin/sh
# Checks the bodies that our clients send against the services' own SDK types.
# The tests write the bodies down; the checker and its instructions are in ../shared/llm. Needs python3 and, once, pip.
#   AXED_WIRE_VENV=DIR   where the SDKs are or will be installed (default: target/wire-venv)
set -eu
cd "$(dirname "$0")/.."

checker=../shared/llm/validate_wire.py
if [ ! -f "$checker" ]; then
    echo "validate_wire: skipped, because $checker is not there"
    exit 0
fi
if ! command -v python3 >/dev/null; then
    echo "validate_wire: skipped, because there is no python3"
    exit 0
fi

venv=${AXED_WIRE_VENV:-target/wire-venv}
sdks="anthropic==2.12.0 openai==3.54.0 ollama==0.6.3"
if [ "$(cat "$venv/sdks" 2>/dev/null)" != "$sdks" ]; then
    python3 -m venv "$venv"
    # shellcheck disable=SC2086
    "$venv/bin/pip" install --quiet --disable-pip-version-check $sdks
    echo "$sdks" >"$venv/sdks"
fi

bodies=$(mktemp -d)
trap 'rm -rf "$bodies"' EXIT
AXED_KEEP_BODIES=$bodies cargo test --quiet --test it -- providers::requests:: providers::content_parts:: >"$bodies/log" 2>&1 || {
    cat "$bodies/log"
    exit 1
}
for wire in anthropic openai responses ollama; do
    # The newest version of Anthropic's API has no sampling parameters: we send them only when they are configured.
    allow=
    [ "$wire" != anthropic ] || allow=temperature,top_p
    streamed=$(grep -l '"stream":true' "$bodies/$wire"-*.json || true)
    whole=$(grep -L '"stream":true' "$bodies/$wire"-*.json || true)
    if [ -z "$streamed" ] || [ -z "$whole" ]; then
        echo "validate_wire: the tests sent no request of both kinds to $wire"
        exit 1
    fi
    # Ollama's types hold a picture as an object, which they write as the text that we send.
    [ "$wire" != ollama ] || "$venv/bin/python" tests/ollama_images.py "$bodies/$wire"-*.json
    check=$checker
    [ "$wire" != responses ] || check=tests/validate_responses.py
    "$venv/bin/python" "$check" "$wire" --allow "$allow" "$bodies/$wire"-*.json >"$bodies/log" || {
        cat "$bodies/log"
        exit 1
    }
    echo "validate_wire: $(grep -c '^ok' "$bodies/log") requests to $wire are as its SDK has them"
done

# The replies of the stories' own provider on the newest wire, against the same types.
mkdir "$bodies/replies"
AXED_KEEP_REPLIES=$bodies/replies cargo test --quiet --test it providers::wires::the_steps >"$bodies/log" 2>&1 || {
    cat "$bodies/log"
    exit 1
}
for kind in reply stream; do
    ending=json
    [ "$kind" = reply ] || ending=sse
    "$venv/bin/python" tests/validate_responses.py responses --kind "$kind" "$bodies/replies"/*."$ending" \
        >"$bodies/log" || {
        cat "$bodies/log"
        exit 1
    }
    echo "validate_wire: $(grep -c '^ok' "$bodies/log") replies of the stories' provider (responses, $kind) are as its SDK has them"
done
