//! Classifies OpenAI models by the model table, or else by name. Pure.

use crate::config::models::ModelFacts;

/// Whether to use the Responses API even for a request that needs a feature of the chat API. OpenAI's current models do not
/// take tools on the chat API.
pub fn prefers_responses_api(model: &str, facts: Option<&ModelFacts>) -> bool {
    match facts {
        Some(facts) if facts.responses || facts.checked_on.is_some() => facts.responses,
        // The model is newer than the table, or belongs to another service.
        Some(_) | None => is_current_model(model),
    }
}

fn is_current_model(model: &str) -> bool {
    let name = base_model(model);
    let is_recent = gpt_version(name).is_some_and(|version| version >= (5, 0));
    is_o_series(name) || (is_recent && !is_chat_model(name))
}

/// Whether a model may reason before it replies. OpenAI models that do not reason reject a request for their reasoning; all
/// other models are assumed to reason.
pub fn may_reason(model: &str, facts: Option<&ModelFacts>) -> bool {
    if let Some(is_reasoning) = facts.and_then(|facts| facts.reasoning) {
        return is_reasoning;
    }
    let model = base_model(model);
    let non_reasoning = ["gpt-3", "gpt-4", "chatgpt-"];
    !is_chat_model(model) && !non_reasoning.iter().any(|family| model.starts_with(family))
}

/// Whether this is a model of OpenAI that its Responses API serves, by its entry or its name. The open models (`gpt-oss`) of other
/// services are not.
pub fn is_openai_model(model: &str, facts: Option<&ModelFacts>) -> bool {
    let name = base_model(model);
    let families = ["gpt-", "chatgpt-", "codex-", "computer-use-"];
    let is_of_family = families.iter().any(|family| name.starts_with(family));
    facts.is_some_and(|facts| facts.responses)
        || is_o_series(name)
        || (is_of_family && !name.starts_with("gpt-oss"))
}

/// Whether a prompt may say where its cached part ends: from GPT-5.6 on, a prompt is found in the cache only up to such a
/// breakpoint.
pub fn takes_cache_breakpoints(model: &str) -> bool {
    gpt_version(base_model(model)).is_some_and(|version| version >= (5, 6))
}

/// A model's own name, without what a service puts before it: a fine-tuned model, a path (`openai/gpt-6-sol`), a region and
/// the maker (`us.openai.gpt-6-sol`).
fn base_model(model: &str) -> &str {
    let name = model.rsplit('/').next().unwrap_or(model);
    let name = name.strip_prefix("ft:").unwrap_or(name);
    name.split_once("openai.").map_or(name, |(_, name)| name)
}

fn is_o_series(name: &str) -> bool {
    let rest = name.strip_prefix('o');
    rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// `(5, 6)` of `gpt-5.6-sol`.
fn gpt_version(name: &str) -> Option<(u32, u32)> {
    let version = name.strip_prefix("gpt-")?.split('-').next()?;
    let (major, minor) = version.split_once('.').unwrap_or((version, "0"));
    let number = |text: &str| {
        let digits = text.split(|c: char| !c.is_ascii_digit()).next()?;
        digits.parse().ok()
    };
    Some((number(major)?, number(minor).unwrap_or(0)))
}

/// A non-reasoning model of ChatGPT, such as `gpt-5-chat-latest`.
fn is_chat_model(model: &str) -> bool {
    model.starts_with("gpt-") && model.contains("-chat")
}

#[cfg(test)]
mod tests {
    use super::{is_openai_model, may_reason, prefers_responses_api, takes_cache_breakpoints};
    use crate::config::models::ModelFacts;

    #[test]
    fn openai_models_are_known_under_the_names_of_other_services() {
        for (model, is_openai, takes_breakpoints) in [
            ("gpt-6-sol", true, true),
            ("gpt-6.2-astra", true, true),
            ("gpt-5.6-2026-07-09", true, true),
            ("gpt-5.10", true, true),
            ("openai/gpt-5.6-terra", true, true),
            ("openai.gpt-6-sol", true, true),
            ("us.openai.gpt-6-sol-v1:0", true, true),
            ("ft:gpt-5.6-sol:me::x", true, true),
            ("gpt-5.5", true, false),
            ("gpt-5", true, false),
            ("gpt-4o", true, false),
            ("o4-mini", true, false),
            ("gpt-oss-120b", false, false),
            ("openai.gpt-oss-120b-1:0", false, false),
            ("my-deployment", false, false),
            ("claude-sonnet-5-5", false, false),
        ] {
            assert_eq!(is_openai_model(model, None), is_openai, "{model}");
            assert_eq!(takes_cache_breakpoints(model), takes_breakpoints, "{model}");
        }
    }

    #[test]
    fn openai_models_are_classified_by_name() {
        for (model, is_preferred, reasons) in [
            ("gpt-5", true, true),
            ("gpt-5.1-codex-max", true, true),
            ("gpt-6-astra", true, true),
            ("gpt-10", true, true),
            ("o3", true, true),
            ("o4-mini-2025-04-16", true, true),
            ("ft:o4-mini:me::x", true, true),
            ("gpt-5-chat-latest", false, false),
            ("gpt-4.1-mini", false, false),
            ("gpt-4o", false, false),
            ("ft:gpt-4.1:me::x", false, false),
            ("gpt-3.5-turbo", false, false),
            ("chatgpt-4o-latest", false, false),
            ("qwen3", false, true),
            ("olmo", false, true),
        ] {
            assert_eq!(prefers_responses_api(model, None), is_preferred, "{model}");
            assert_eq!(may_reason(model, None), reasons, "{model}");
        }
        let model_facts = |responses, reasoning| ModelFacts {
            checked_on: Some("2026-11-22".to_owned()),
            responses,
            reasoning: Some(reasoning),
            ..ModelFacts::default()
        };
        assert!(!prefers_responses_api(
            "gpt-5",
            Some(&model_facts(false, true))
        ));
        assert!(prefers_responses_api(
            "gpt-4o",
            Some(&model_facts(true, true))
        ));
        assert!(!may_reason("gpt-5", Some(&model_facts(true, false))));
        // A configured entry for a model that is not in the table may be incomplete.
        let priced = ModelFacts::default();
        assert!(
            prefers_responses_api("gpt-7", Some(&priced)) && may_reason("gpt-7", Some(&priced))
        );
    }
}
