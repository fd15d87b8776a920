//! Domain types, such as agents, runs, messages, events and usage. No I/O.

pub mod agent;
pub mod approval;
pub mod attachment;
pub mod calendar;
pub mod content;
pub mod context;
pub mod event;
pub mod excerpt;
pub mod failure;
pub mod glob;
pub mod json_schema;
pub mod mcp;
pub mod message;
pub mod run;
pub mod run_excerpt;
pub mod service;
pub mod structured;
pub mod suggestion;
pub mod terminal_text;
pub mod trace;
pub mod usage;
pub mod usage_sums;
pub mod warning;
pub mod webhook;
