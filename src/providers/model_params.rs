//! Adapts parameters to a model: removes those that it is known to reject, and picks the nearest supported effort.

use std::borrow::Cow;

use crate::config::models::ModelFacts;
use crate::config::models::lookup;
use crate::domain::agent::model_ref::ModelRef;
use crate::domain::agent::params::{Effort, Params};
use crate::domain::service::Service;
use crate::domain::warning::{Warning, WarningCode};

/// Returns the parameters that the model takes, and a warning for each change.
pub fn fit_to_model<'a>(
    model: &str,
    params: &'a Params,
    facts: Option<&ModelFacts>,
) -> (Cow<'a, Params>, Vec<Warning>) {
    let (mut params, mut warnings) = (Cow::Borrowed(params), Vec::new());
    let Some(facts) = facts else {
        return (params, warnings);
    };
    if let (Some(wanted), Some(levels)) = (params.effort, &facts.effort) {
        let fitted = fit_effort(wanted, levels);
        if fitted != Some(wanted) {
            params.to_mut().effort = fitted;
            warnings.extend(effort_warning(model, wanted, fitted));
        }
    }
    let has_sampling = params.temperature.is_some() || params.top_p.is_some();
    if has_sampling && !facts.allows_sampling(&params) {
        let params = params.to_mut();
        let dropped = [
            params.temperature.take().map(|_| "temperature"),
            params.top_p.take().map(|_| "top_p"),
        ];
        let dropped: Vec<_> = dropped.into_iter().flatten().collect();
        let message = format!(
            "{model} does not take {}: left out of the request",
            dropped.join(" and ")
        );
        warnings.push(Warning::new(WarningCode::ParamDropped, &message));
    }
    (params, warnings)
}

/// Removes the requested service tier if the model is not offered with it, and returns a warning. `available` are the
/// provider's tiers.
pub fn fit_service_tier(
    model: &str,
    params: &mut Cow<'_, Params>,
    facts: Option<&ModelFacts>,
    available: &[Service],
) -> Option<Warning> {
    let wanted = params.service.filter(|it| *it != Service::Default)?;
    if available.contains(&wanted) && facts.is_none_or(|facts| facts.is_sold_on(wanted)) {
        return None;
    }
    params.to_mut().service = None;
    let wanted = wanted.as_str();
    let message =
        format!("{model} is not offered with service \"{wanted}\": sent with the default");
    Some(Warning::new(WarningCode::ServiceChanged, &message))
}

/// Of a model whose last day is near, or past.
pub fn end_warning(model: &ModelRef, facts: Option<&ModelFacts>) -> Option<Warning> {
    let text = facts?.end_warning(&model.provider, &model.model, lookup::today())?;
    Some(Warning::new(WarningCode::ModelEnds, &text))
}

fn fit_effort(wanted: Effort, levels: &[Effort]) -> Option<Effort> {
    match (wanted, levels) {
        (_, []) => None,
        (Effort::None, levels) if !levels.contains(&Effort::None) => {
            let lowest = levels.first().copied();
            Some(Effort::Low)
                .filter(|low| levels.contains(low))
                .or(lowest)
        }
        _ => wanted.nearest(levels),
    }
}

/// `None` if nothing changes for the user: the effort is "none" and the model takes no effort.
fn effort_warning(model: &str, wanted: Effort, fitted: Option<Effort>) -> Option<Warning> {
    let wanted = wanted.as_str();
    let message = match fitted {
        Some(level) => {
            let level = level.as_str();
            format!("{model} does not take effort \"{wanted}\": sent the nearest, \"{level}\"")
        }
        None if wanted == "none" => return None,
        None => format!("{model} takes no effort: \"{wanted}\" was left out"),
    };
    Some(Warning::new(WarningCode::EffortChanged, &message))
}

#[cfg(test)]
mod tests {
    use super::fit_to_model;
    use crate::config::models::{ModelFacts, Sampling};
    use crate::domain::agent::params::{Effort, Params, ReasoningSummary};
    use crate::domain::warning::{Warning, WarningCode};

    fn params(effort: Option<Effort>, temperature: Option<f64>) -> Params {
        Params {
            effort,
            temperature,
            ..Params::default()
        }
    }

    #[test]
    fn unsupported_parameters_are_removed_with_a_warning() {
        let facts = ModelFacts {
            sampling: Sampling::WithoutEffort,
            effort: Some(vec![Effort::Low, Effort::High]),
            reasoning: Some(true),
            ..ModelFacts::default()
        };
        for (requested, sent, warnings) in [
            ((None, Some(0.5)), (None, Some(0.5)), 0),
            (
                (Some(Effort::High), Some(0.5)),
                (Some(Effort::High), None),
                1,
            ),
            ((Some(Effort::Max), None), (Some(Effort::High), None), 1),
            ((Some(Effort::None), None), (Some(Effort::Low), None), 1),
            ((Some(Effort::Low), None), (Some(Effort::Low), None), 0),
        ] {
            let requested = params(requested.0, requested.1);
            let (fitted, messages) = fit_to_model("p/m", &requested, Some(&facts));
            assert_eq!((fitted.effort, fitted.temperature), sent);
            assert_eq!(messages.len(), warnings, "{messages:?}");
        }
        let summarized = Params {
            reasoning_summary: Some(ReasoningSummary::Auto),
            ..params(None, Some(0.5))
        };
        for (adaptive, sent) in [(false, Some(0.5)), (true, None)] {
            let facts = ModelFacts {
                adaptive_thinking: Some(adaptive),
                ..facts.clone()
            };
            let (fitted, _) = fit_to_model("p/m", &summarized, Some(&facts));
            assert_eq!(fitted.temperature, sent, "a summary makes the model think");
        }
        let plain = ModelFacts {
            effort: Some(Vec::new()),
            ..ModelFacts::default()
        };
        let requested = params(Some(Effort::High), Some(0.0));
        let (fitted, messages) = fit_to_model("p/m", &requested, Some(&plain));
        assert_eq!((fitted.effort, fitted.temperature), (None, Some(0.0)));
        let message = "p/m takes no effort: \"high\" was left out";
        assert_eq!(
            messages,
            [Warning::new(WarningCode::EffortChanged, message)]
        );
        let (fitted, messages) = fit_to_model("p/m", &requested, None);
        assert_eq!((fitted.effort, messages.len()), (Some(Effort::High), 0));
    }
}
