//! Reads `[[triggers]]` of an agent file.

use crate::catalog::schedules::{check_list, read_labels, read_name, read_text};
use crate::domain::text_template::TextTemplate;
use crate::domain::trigger::{MAX_TRIGGERS, Trigger, TriggerKind, WakeTemplate};
use crate::settings::kinds::check_variable_name;
use crate::settings::table_reader::TableReader;

/// Returns the triggers in the file's order; invalid ones are reported as problems.
pub fn read(top: &mut TableReader<'_>, key: &'static str) -> Vec<Trigger> {
    let node = top.peek(key);
    let triggers = top.table_list(key, parse_trigger);
    let triggers: Vec<Trigger> = triggers.into_iter().flatten().collect();
    let names = triggers.iter().map(|trigger| trigger.name.as_str());
    if let (Err(why), Some(node)) = (check_list(names, MAX_TRIGGERS), node) {
        top.push_invalid(&node, key, &why);
    }
    triggers
}

fn parse_trigger(t: &mut TableReader<'_>) -> Option<Trigger> {
    let name = read_name(t);
    let has_kind = t.peek("kind").is_some();
    let kinds = [
        ("standard", TriggerKind::Standard),
        ("github", TriggerKind::Github),
        ("stripe", TriggerKind::Stripe),
    ];
    let kind = t.one_of("kind", &kinds);
    if !has_kind {
        t.push_missing("kind", "is required: standard, github or stripe");
    }
    let has_secret = t.peek("secret_env").is_some();
    let secret_env = t.parsed_text("secret_env", check_variable_name);
    if !has_secret {
        t.push_missing(
            "secret_env",
            "is required: the environment variable with the secret that the sender signs with",
        );
    }
    let has_template = t.peek("input_template").is_some();
    let template = t.parsed_text("input_template", parse_template);
    let wake_node = t.peek("wake");
    let wake = t.nested("wake", |wake| {
        for key in ["event", "key"] {
            if wake_node.is_some() && wake.peek(key).is_none() {
                wake.push_missing(key, "is required");
            }
        }
        let event = wake.parsed_text("event", parse_template);
        let key = wake.parsed_text("key", parse_template);
        Some(WakeTemplate {
            event: event?,
            key: key?,
        })
    });
    if let (Some(node), true) = (&wake_node, has_template || t.peek("labels").is_some()) {
        let why = "cannot stand beside input_template or labels, which are for runs";
        t.push_invalid(node, "wake", why);
    }
    let labels = read_labels(t);
    let key = read_text(t, "key");
    if (has_template && template.is_none()) || (wake_node.is_some() && wake.is_none()) {
        return None;
    }
    Some(Trigger {
        name: name?,
        kind: kind?,
        secret_env: secret_env?,
        input_template: template,
        wake,
        labels,
        key,
    })
}

/// A template whose values are those of `body`.
fn parse_template(text: &str) -> Result<TextTemplate, String> {
    let template = TextTemplate::parse(text)?;
    let is_other = |path: &&[String]| path.first().is_none_or(|root| root != "body");
    let other = template.paths().find(is_other).map(|path| path.join("."));
    match other {
        None => Ok(template),
        Some(path) => Err(format!(
            "has {{{path}}}, which is no value of the body: use {{body}} or {{body.path}}, and {{{{ for a brace"
        )),
    }
}
