//! The input of a triggered run: a text with places for values of the request's JSON body, such as `{body.issue.title}`.

use serde_json::Value;

/// Places of one template.
const MAX_PLACES: usize = 64;

/// `{body}` is the whole body, `{body.a.0.b}` a value in it, `{{` and `}}` are braces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyTemplate {
    text: String,
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Literal(String),
    /// The keys and indexes that lead to a value; none for the whole body.
    Path(Vec<String>),
}

impl BodyTemplate {
    /// # Errors
    /// The second half of a sentence that begins with the key.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut literal = String::new();
        let mut rest = text;
        while let Some(brace) = rest.find(['{', '}']) {
            let (before, after) = rest.split_at(brace);
            literal.push_str(before);
            if let Some(after) = after.strip_prefix("{{") {
                literal.push('{');
                rest = after;
            } else if let Some(after) = after.strip_prefix("}}") {
                literal.push('}');
                rest = after;
            } else if let Some((place, after)) =
                after.strip_prefix('{').and_then(|it| it.split_once('}'))
            {
                parts.push(Part::Literal(std::mem::take(&mut literal)));
                parts.push(Part::Path(parse_path(place)?));
                rest = after;
            } else {
                return Err(format!(
                    "has a single brace in \"{}\"; write {{{{ or }}}} for a brace",
                    after.chars().take(20).collect::<String>()
                ));
            }
        }
        literal.push_str(rest);
        parts.push(Part::Literal(literal));
        let places = parts.iter().filter(|it| matches!(it, Part::Path(_)));
        match places.count() > MAX_PLACES {
            true => Err(format!("cannot have more than {MAX_PLACES} values")),
            false => Ok(Self {
                text: text.to_owned(),
                parts,
            }),
        }
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Texts are inserted as they are, other values as JSON, missing ones as nothing. `None` if the result has more than
    /// `max_bytes`.
    pub fn render(&self, body: &Value, max_bytes: usize) -> Option<String> {
        let mut text = String::new();
        for part in &self.parts {
            match part {
                Part::Literal(literal) => text.push_str(literal),
                Part::Path(path) => match find(body, path) {
                    None | Some(Value::Null) => {}
                    Some(Value::String(value)) => text.push_str(value),
                    Some(value) => text.push_str(&value.to_string()),
                },
            }
            if text.len() > max_bytes {
                return None;
            }
        }
        Some(text)
    }
}

fn parse_path(place: &str) -> Result<Vec<String>, String> {
    let mut keys = place.split('.').map(str::to_owned);
    let root = keys.next();
    let keys: Vec<String> = keys.collect();
    let is_valid = root.as_deref() == Some("body") && keys.iter().all(|key| !key.trim().is_empty());
    match is_valid {
        true => Ok(keys),
        false => Err(format!(
            "has {{{place}}}, which is no value of the body: use {{body}} or {{body.path}}, and {{{{ for a brace"
        )),
    }
}

fn find<'v>(body: &'v Value, path: &[String]) -> Option<&'v Value> {
    path.iter().try_fold(body, |value, key| match value {
        Value::Array(items) => items.get(key.parse::<usize>().ok()?),
        value => value.get(key),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::BodyTemplate;

    #[test]
    fn values_of_the_body_are_inserted() {
        let body = json!({
            "action": "opened", "issue": {"title": "It {body} fails", "number": 7, "labels": [{"name": "bug"}]}, "empty": null,
        });
        for (template, expected) in [
            ("no values", "no values"),
            (
                "{body.action}: {body.issue.title}",
                "opened: It {body} fails",
            ),
            ("#{body.issue.number}{body.empty}{body.none.at.all}", "#7"),
            ("{body.issue.labels.0.name}{body.issue.labels.x}", "bug"),
            ("{body.issue.labels}", r#"[{"name":"bug"}]"#),
            ("{{body}} }}", "{body} }"),
        ] {
            let parsed = BodyTemplate::parse(template).expect(template);
            assert_eq!(parsed.render(&body, 1000).as_deref(), Some(expected));
        }
        let whole = BodyTemplate::parse("{body}").expect("a template");
        assert_eq!(whole.render(&body, 1000), Some(body.to_string()));
        assert_eq!(whole.render(&body, 20), None);
    }

    #[test]
    fn other_places_and_single_braces_are_errors() {
        for (template, expected) in [
            ("{title}", "has {title}, which is no value of the body"),
            ("{body.}", "has {body.}"),
            ("a { b", "has a single brace in \"{ b\""),
            ("a } b", "has a single brace"),
            (&"{body}".repeat(65), "cannot have more than 64 values"),
        ] {
            let error = BodyTemplate::parse(template).expect_err(template);
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
