//! A run with only the fields that the client names: `?fields=id,status`.

use axum::http::StatusCode;
use axum::response::Response;
use indexmap::IndexMap;
use serde_json::value::RawValue;

use crate::web::error::{Problem, did_you_mean, quote};
use crate::web::response::json::json_response;
use crate::web::response::run::RunView;

/// The fields of a run that `names` has, separated by commas, in this order. 400 if a name is not one of a field.
pub fn selected_fields(
    status: StatusCode,
    run: &RunView<'_>,
    names: &str,
) -> Result<Response, Problem> {
    let internal = |error| Problem::internal(format!("a run cannot be serialized: {error}"));
    let json = serde_json::to_string(run).map_err(internal)?;
    let fields: IndexMap<&str, &RawValue> = serde_json::from_str(&json).map_err(internal)?;
    let mut selected = IndexMap::new();
    for name in names.split(',').map(str::trim) {
        let Some((name, value)) = fields.get_key_value(name) else {
            let known: Vec<&str> = fields.keys().copied().collect();
            let why = format_args!(
                "{} is no field of a run{}; the fields are {}",
                quote(name),
                did_you_mean(name, known.iter().copied()),
                known.join(", ")
            );
            return Err(Problem::parameter("fields", why));
        };
        selected.insert(*name, *value);
    }
    Ok(json_response(status, &selected))
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;

    use super::selected_fields;
    use crate::domain::run::{Run, RunId, Scope};
    use crate::web::response::run::RunView;

    #[test]
    fn an_unknown_field_is_answered_with_the_known_ones() {
        let run = Run::queued(&Scope::root(RunId::new(), None), "a".to_owned());
        let view = RunView::new(&run, "", run.created_at);
        let select = |names: &str| selected_fields(StatusCode::OK, &view, names);
        assert!(select("status, id,status").is_ok());
        for (names, expected) in [
            (
                "statsu",
                r#"\"statsu\" is no field of a run; did you mean \"status\"?; the fields are id, agent,"#,
            ),
            ("", r#"\"\" is no field"#),
            ("id,,status", r#"\"\" is no field"#),
        ] {
            let problem = select(names).expect_err(names);
            let body = String::from_utf8_lossy(&problem.render("", "")).into_owned();
            assert!(body.contains(expected), "{body}");
        }
    }
}
