//! Stories about axed from outside: the real daemon as a process, a provider that speaks the real wires.

mod admission;
mod architecture;
mod batches;
mod cli;
mod clients;
mod cluster;
mod config;
mod delegation;
mod docs;
mod evals;
mod faults;
mod forks;
mod hostile;
mod http;
mod providers;
mod recovery;
mod runs;
mod schedules;
mod shipped_models;
mod store;
mod support;
mod telemetry;
mod tools;
mod triggers;
mod usage;
mod webhooks;
