//! `[data]`: where runs are recorded, what of them, and how long they are kept.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::SecretString;

use crate::config::cluster::Cluster;
use crate::config::environment::{Environment, env_value};
use crate::config::load_context::LoadContext;
use crate::config::{Data, Durability, RequestRecording, Retention, RetentionLimit};
use crate::domain::node::check_labels;
use crate::domain::redaction::Redactor;
use crate::settings::document::Value;
use crate::settings::table_reader::TableReader;

/// A year with a month before it.
const DEFAULT_USAGE_RETENTION: Duration = Duration::from_secs(400 * 86_400);

pub(in crate::config) fn read(
    s: &mut TableReader<'_>,
    context: &LoadContext<'_>,
    cluster: Cluster,
) -> Data {
    let durabilities = [
        ("process", Durability::Process),
        ("power", Durability::Power),
    ];
    Data {
        dir: s
            .parsed_text("dir", |text| context.resolve_path(text))
            .unwrap_or_else(|| PathBuf::from("data")),
        url: s
            .parsed_text("url", check_database_url)
            .map(SecretString::from),
        listen_url: s
            .parsed_text("listen_url", check_database_url)
            .map(SecretString::from),
        cluster,
        durability: s.one_of("durability", &durabilities).unwrap_or_default(),
        retention: s.nested("retention", read_retention),
        usage_retention: Some(s.age("usage_retention").unwrap_or(DEFAULT_USAGE_RETENTION))
            .filter(|age| !age.is_zero()),
        requests: RequestRecording {
            is_off: s.one_of("requests", &[("full", false), ("off", true)]) == Some(true),
            redactor: read_redactor(s),
        },
    }
}

fn check_database_url(url: &str) -> Result<String, String> {
    match url.starts_with("postgres://") || url.starts_with("postgresql://") {
        true => Ok(url.to_owned()),
        false => Err("is no PostgreSQL URL, such as postgres://user@host/database".to_owned()),
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

fn read_retention(s: &mut TableReader<'_>) -> Retention {
    let defaults = read_retention_limit(s, RetentionLimit::default());
    Retention {
        completed: s.nested("completed", |s| read_retention_limit(s, defaults)),
        failed: s.nested("failed", |s| read_retention_limit(s, defaults)),
        cancelled: s.nested("cancelled", |s| read_retention_limit(s, defaults)),
    }
}

/// The section's values, or `defaults`; 0 means no limit.
fn read_retention_limit(s: &mut TableReader<'_>, defaults: RetentionLimit) -> RetentionLimit {
    RetentionLimit {
        age: s
            .age("age")
            .map_or(defaults.age, |age| Some(age).filter(|age| !age.is_zero())),
        count: s.count("count", 0).map_or(defaults.count, |count| {
            Some(count).filter(|count| *count > 0)
        }),
    }
}

/// Reads `[cluster]`.
pub(in crate::config) fn read_cluster(
    s: &mut TableReader<'_>,
    environment: &Environment,
) -> Cluster {
    let node = s.parsed_text("node", |name| match name.chars().any(char::is_control) {
        true => Err("contains a control character".to_owned()),
        false => Ok(name.to_owned()),
    });
    let labels_node = s.peek("labels");
    let labels = s.text_list("labels").unwrap_or_default();
    if let (Some(node), Err(why)) = (labels_node, check_labels(&labels)) {
        s.push_invalid(&node, "labels", &why);
    }
    Cluster {
        node: node.unwrap_or_else(|| host_name(environment)),
        unique_names: s.flag("unique_names").unwrap_or(false),
        labels,
    }
}

fn host_name(environment: &Environment) -> String {
    let of_kernel = fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = of_kernel.as_deref().or(env_value(environment, "HOSTNAME"));
    let name = name.map(str::trim).filter(|name| !name.is_empty());
    name.unwrap_or("localhost").to_owned()
}
