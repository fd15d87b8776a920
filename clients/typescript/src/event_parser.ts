// Reads events from the bytes of a stream.

import { parsed } from "./errors.js";
import type { RunEvent } from "./events.js";

export class EventParser {
  private readonly decoder = new TextDecoder();
  private rest = "";
  private data: string[] = [];

  feed(chunk: Uint8Array): RunEvent[] {
    const lines = (this.rest + this.decoder.decode(chunk, { stream: true })).split("\n");
    this.rest = lines.pop() ?? "";
    const events: RunEvent[] = [];
    for (const line of lines) {
      const text = line.endsWith("\r") ? line.slice(0, -1) : line;
      if (text.startsWith("data:")) {
        this.data.push(text.slice(text[5] === " " ? 6 : 5));
      } else if (text === "" && this.data.length > 0) {
        events.push(parsed(this.data.join("\n"), "an event") as RunEvent);
        this.data = [];
      }
    }
    return events;
  }
}
