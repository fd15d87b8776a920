export { Client, type CallOptions, type ClientOptions, type StartOptions, type WaitOptions } from "./client.js";
export * from "./errors.js";
export { RunStream } from "./run_stream.js";
export type * from "./events.js";
export type * from "./types.js";
