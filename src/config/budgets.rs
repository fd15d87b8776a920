//! `[budgets.<name>]`: how much the runs of a key, of an agent or with a label may use in a day or a month.

use std::collections::BTreeSet;

use jiff::tz::TimeZone;

use crate::config::environment::is_valid_name;
use crate::domain::calendar::{Period, time_zone};
use crate::domain::period_budget::{ALERT_EVENT, PeriodBudget, PeriodLimit};
use crate::domain::usage::Cost;
use crate::domain::webhook::Webhook;
use crate::settings::document::Value;
use crate::settings::kinds::check_variable_name;
use crate::settings::table_reader::TableReader;
use crate::ssrf;

/// The largest budget in USD; more picodollars do not fit their type.
const MAX_USD: f64 = 10_000_000.0;
/// As many tokens as the store can count.
const MAX_TOKENS: u64 = i64::MAX as u64;
/// The most shares with an alert.
const MAX_ALERTS: usize = 20;
/// The shares of a budget without `alert_at`, in thousandths.
const DEFAULT_ALERTS: [u32; 1] = [800];

/// Reads all sections.
pub(in crate::config) fn read(top: &mut TableReader<'_>) -> Vec<PeriodBudget> {
    let budgets = top.tables_by_name("budgets", read_budget);
    budgets.into_values().flatten().collect()
}

/// `None` if the limit or the period is missing or wrong.
fn read_budget(name: &str, s: &mut TableReader<'_>) -> Option<PeriodBudget> {
    if !is_valid_name(name) {
        s.push_invalid_name(
            "is not a valid budget name: up to 64 letters, digits, - _ . without two _ in a row",
        );
    }
    let (key, agent, labels) = s.nested("match", |s| {
        let (key, agent) = (s.text("key"), s.text("agent"));
        let labels = s.texts_by_name("label", |_, value| Ok(value.to_owned()));
        (key, agent, labels)
    });
    let limit = read_limit(s);
    if s.peek("per").is_none() {
        s.push_missing("per", "is required: \"day\" or \"month\"");
    }
    let per = s.one_of("per", &[("day", Period::Day), ("month", Period::Month)]);
    let zone = s.parsed_text("timezone", |name| {
        time_zone(name).ok_or_else(|| {
            format!("is {name:?}, which is not a time zone; write one such as Europe/Berlin")
        })
    });
    Some(PeriodBudget {
        name: name.to_owned(),
        key,
        agent,
        labels,
        alert_at: read_alerts(s),
        webhook: read_webhook(s),
        limit: limit?,
        per: per?,
        time_zone: zone.unwrap_or(TimeZone::UTC),
    })
}

fn read_limit(s: &mut TableReader<'_>) -> Option<PeriodLimit> {
    let (usd_node, tokens_node) = (s.peek("usd"), s.peek("tokens"));
    let usd = s.number("usd", 0.0..=MAX_USD);
    let tokens = s.integer("tokens", 0..=MAX_TOKENS);
    match (usd_node, tokens_node) {
        (Some(_), Some(node)) => {
            s.push_invalid(
                &node,
                "tokens",
                "cannot be set beside usd; make two budgets",
            );
            None
        }
        (None, None) => {
            s.push_missing("usd", "or tokens is required: how much may be used");
            None
        }
        _ => {
            let usd = usd.map(|usd| PeriodLimit::Usd(Cost::from_usd(usd)));
            usd.or(tokens.map(PeriodLimit::Tokens))
        }
    }
}

/// The shares in thousandths.
fn read_alerts(s: &mut TableReader<'_>) -> Vec<u32> {
    let Some(node) = s.take_node("alert_at") else {
        return DEFAULT_ALERTS.to_vec();
    };
    let share = |value: &Value| match value {
        Value::Float(share) => Some(*share),
        Value::Integer(share) => Some(*share as f64),
        _ => None,
    };
    let shares: Option<Vec<f64>> = match &node.value {
        Value::Array(items) => items.iter().map(|item| share(&item.value)).collect(),
        Value::Untyped(text) => text.split(',').map(|it| it.trim().parse().ok()).collect(),
        _ => None,
    };
    let is_valid = |shares: &Vec<f64>| {
        shares.len() <= MAX_ALERTS && shares.iter().all(|share| (0.001..=1.0).contains(share))
    };
    let Some(shares) = shares.filter(is_valid) else {
        let why = format!(
            "must be a list of at most {MAX_ALERTS} shares from 0.001 to 1, such as [0.5, 0.8]"
        );
        s.push_invalid(&node, "alert_at", &why);
        return Vec::new();
    };
    let shares = shares
        .into_iter()
        .map(|share| (share * 1000.0).round() as u32);
    shares.collect::<BTreeSet<_>>().into_iter().collect()
}

/// A URL, or a table with `url` and `secret_env`.
fn read_webhook(s: &mut TableReader<'_>) -> Option<Webhook> {
    let check_url = |text: &str| match ssrf::parse_url(text) {
        Ok(url) => Ok(url.to_string()),
        Err(error) => Err(error.to_string()),
    };
    let webhook = |url, secret_env| Webhook {
        url,
        secret_env,
        events: vec![ALERT_EVENT.to_owned()],
    };
    let node = s.peek("webhook");
    if !matches!(node.map(|node| node.value), Some(Value::Table(_))) {
        let url = s.parsed_text("webhook", check_url);
        return url.map(|url| webhook(url, None));
    }
    s.nested("webhook", |s| {
        if s.peek("url").is_none() {
            s.push_missing("url", "is required: where alerts are sent");
        }
        let url = s.parsed_text("url", check_url);
        let secret_env = s.parsed_text("secret_env", check_variable_name);
        url.map(|url| webhook(url, secret_env))
    })
}
