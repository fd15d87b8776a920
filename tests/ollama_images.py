#!/usr/bin/env python3
"""Puts the pictures of Ollama's request bodies into the form that its package's types have in memory, for validate_wire.sh.

  ollama_images.py FILE...

Each must be Base64, and is written unchanged by those types; otherwise the checker reports it.
"""
import base64, json, sys

from ollama._types import Image

for name in sys.argv[1:]:
    with open(name) as file:
        body = json.load(file)
    pictures = [message for message in body["messages"] if "images" in message]
    for message in pictures:
        for place, text in enumerate(message["images"]):
            base64.b64decode(text, validate=True)
            if Image(value=text).model_dump() == text:
                message["images"][place] = {"value": text}
    if pictures:
        with open(name, "w") as file:
            json.dump(body, file, separators=(",", ":"))
