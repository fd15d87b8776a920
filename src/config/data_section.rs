//! `[data]`: where runs are recorded, what of them, and how long they are kept.

use std::fs;

use crate::config::cluster::Cluster;
use crate::config::environment::{Environment, env_value};
use crate::config::{RequestRecording, Retention, RetentionLimit};
use crate::domain::redaction::Redactor;
use crate::settings::document::Value;
use crate::settings::section::{Section, read_section};
use crate::settings::table_reader::TableReader;

pub(in crate::config) fn check_database_url(url: &str) -> Result<String, String> {
    match url.starts_with("postgres://") || url.starts_with("postgresql://") {
        true => Ok(url.to_owned()),
        false => Err("is no PostgreSQL URL, such as postgres://user@host/database".to_owned()),
    }
}

/// Reads `requests` and `redact`.
pub(in crate::config) fn read_recording(
    s: &mut TableReader<'_>,
    key: &'static str,
) -> RequestRecording {
    RequestRecording {
        is_off: s.one_of(key, &[("full", false), ("off", true)]) == Some(true),
        redactor: read_redactor(s),
    }
}

fn read_redactor(s: &mut TableReader<'_>) -> Redactor {
    let node = s.peek("redact");
    let patterns = s.text_list("redact").unwrap_or_default();
    let mut redactor = Redactor::default();
    for (index, pattern) in patterns.iter().enumerate() {
        let Err(error) = redactor.add(pattern) else {
            continue;
        };
        let item = match node.as_ref().map(|node| &node.value) {
            Some(Value::Array(items)) => items.get(index),
            _ => node.as_ref(),
        };
        if let Some(item) = item {
            s.push_invalid(item, "redact", &error.to_string());
        }
    }
    redactor
}

/// The keys of `[data.retention]` hold for every outcome that has no table of its own.
pub(in crate::config) fn read_retention(s: &mut TableReader<'_>, key: &'static str) -> Retention {
    s.nested(key, |s| {
        let all: RetentionLimit = read_section(s);
        let outcome = |s: &mut TableReader<'_>, key| {
            s.nested(key, |s| {
                let mut limit = all;
                limit.read(s);
                limit
            })
        };
        Retention {
            completed: outcome(s, "completed"),
            failed: outcome(s, "failed"),
            cancelled: outcome(s, "cancelled"),
        }
    })
}

/// Reads `[cluster]`.
pub(in crate::config) fn read_cluster(
    s: &mut TableReader<'_>,
    environment: &Environment,
) -> Cluster {
    let mut cluster: Cluster = read_section(s);
    if cluster.node.is_empty() {
        cluster.node = host_name(environment);
    }
    cluster
}

fn host_name(environment: &Environment) -> String {
    let of_kernel = fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = of_kernel.as_deref().or(env_value(environment, "HOSTNAME"));
    let name = name.map(str::trim).filter(|name| !name.is_empty());
    name.unwrap_or("localhost").to_owned()
}
