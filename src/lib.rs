//! axed: a daemon that serves LLM agents over HTTP. `docs/ARCHITECTURE.md` describes the modules.

pub mod app;
pub mod catalog;
pub mod cli;
pub mod config;
pub mod domain;
pub mod engine;
pub mod fair;
pub mod instruments;
pub mod providers;
pub mod record;
pub mod settings;
pub mod signed_http;
pub mod ssrf;
pub mod standing_task;
pub mod store;
pub mod telemetry;
pub mod tools;
pub mod validation;
pub mod web;
pub mod webhooks;
pub mod workdirs;
