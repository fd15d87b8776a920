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
    let model = base_model(model);
    let is_o_series = model
        .strip_prefix('o')
        .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let number = model.strip_prefix("gpt-").and_then(|rest| {
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
        digits.parse::<u32>().ok()
    });
    is_o_series || (number.is_some_and(|number| number >= 5) && !is_chat_model(model))
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

/// A model's name without the prefix of a fine-tuned model.
fn base_model(model: &str) -> &str {
    model.strip_prefix("ft:").unwrap_or(model)
}

/// A non-reasoning model of ChatGPT, such as `gpt-5-chat-latest`.
fn is_chat_model(model: &str) -> bool {
    model.starts_with("gpt-") && model.contains("-chat")
}

#[cfg(test)]
mod tests {
    use super::{may_reason, prefers_responses_api};
    use crate::config::models::ModelFacts;

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
