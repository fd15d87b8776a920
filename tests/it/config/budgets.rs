//! `[budgets.<name>]` in the configuration.

use crate::config::server::{config, error};

#[test]
fn an_invalid_budget_is_named_with_its_line() {
    for (text, line, expected) in [
        (
            "usd = 5",
            ":1:",
            "budgets.b.per is required: \"day\" or \"month\"",
        ),
        (
            "per = \"day\"",
            ":1:",
            "budgets.b.usd or tokens is required",
        ),
        (
            "per = \"week\"\nusd = 5",
            ":2:",
            "budgets.b.per must be one of: day, month",
        ),
        (
            "per = \"day\"\nusd = -1",
            ":3:",
            "budgets.b.usd must be non-negative",
        ),
        (
            "per = \"day\"\nusd = 1\ntokens = 1",
            ":4:",
            "budgets.b.tokens cannot be set beside usd",
        ),
        (
            "per = \"day\"\nusd = 1\ntimezone = \"Mars\"",
            ":4:",
            "budgets.b.timezone is \"Mars\", which is not a time zone",
        ),
        (
            "per = \"day\"\nusd = 1\nalert_at = [80]",
            ":4:",
            "budgets.b.alert_at must be a list",
        ),
        (
            "per = \"day\"\nusd = 1\nwebhook = \"x\"",
            ":4:",
            "budgets.b.webhook",
        ),
        (
            "per = \"day\"\nusd = 1\nmatch = { agnet = \"a\" }",
            ":4:",
            "unknown key \"budgets.b.match.agnet\"",
        ),
    ] {
        let error = error(&format!("[budgets.b]\n{text}"), &[]);
        assert!(
            error.contains(line) && error.contains(expected),
            "{line} {expected} is not in {error}"
        );
    }
    let valid = "[budgets.b]\nper = \"month\"\ntokens = 1_000\nalert_at = [1, 0.25, 0.25]\nmatch = { label.team = \"blue\" }";
    let budget = config(valid, &[]).expect("a config").budgets.remove(0);
    assert_eq!(budget.alert_at, [250, 1000]);
    assert_eq!(budget.labels["team"], "blue");
}
