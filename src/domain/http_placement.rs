//! Where arguments of a tool go in its request, beside the path: query, headers, and body.

use std::fmt::Write;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::domain::text_template::push_value;

/// Absent and null arguments are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    pub query: Vec<QueryArgument>,
    pub headers: Vec<HeaderArgument>,
    /// The argument that is the body.
    pub body: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueryArgument {
    pub argument: String,
    pub name: String,
    pub style: QueryStyle,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeaderArgument {
    pub argument: String,
    pub name: String,
}

/// How lists and objects are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueryStyle {
    /// `a=1&a=2`; an object's fields by their own names.
    Exploded,
    /// `a=1,2`
    Commas,
    /// `a=1%202`
    Spaces,
    /// `a=1|2`
    Pipes,
    /// `a[x]=1`
    Deep,
    /// As JSON.
    Json,
}

impl Placement {
    /// Appends the query to an address.
    pub fn push_query(&self, url: &mut String, arguments: &Value) {
        for argument in &self.query {
            let value = arguments.get(&argument.argument);
            for (name, text) in value.map(|it| pairs(argument, it)).unwrap_or_default() {
                url.push(if url.contains('?') { '&' } else { '?' });
                push_encoded(url, &name);
                url.push('=');
                push_encoded(url, &text);
            }
        }
    }

    /// The headers of a call.
    pub fn headers(&self, arguments: &Value) -> Vec<(&str, String)> {
        let present = self.headers.iter().filter_map(|header| {
            let value = arguments.get(&header.argument)?;
            let text = match value {
                Value::Array(items) => join(items, ","),
                value => text(value),
            };
            (!value.is_null()).then_some((header.name.as_str(), text))
        });
        present.collect()
    }
}

/// The fields of a form; lists repeat their name.
pub fn form(fields: &Value) -> String {
    let mut body = String::new();
    for (name, value) in fields.as_object().into_iter().flatten() {
        let values = match value {
            Value::Array(items) => items.as_slice(),
            value => std::slice::from_ref(value),
        };
        for value in values.iter().filter(|value| !value.is_null()) {
            if !body.is_empty() {
                body.push('&');
            }
            push_encoded(&mut body, name);
            body.push('=');
            push_encoded(&mut body, &text(value));
        }
    }
    body
}

/// Appends a text in which only unreserved characters (RFC 3986) are not percent-encoded.
pub fn push_encoded(target: &mut String, text: &str) {
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                target.push(char::from(byte));
            }
            // Writing to a text cannot fail.
            _ => drop(write!(target, "%{byte:02X}")),
        }
    }
}

/// The names and values of one argument.
fn pairs(argument: &QueryArgument, value: &Value) -> Vec<(String, String)> {
    let name = || argument.name.clone();
    let separator = match argument.style {
        QueryStyle::Json => return vec![(name(), value.to_string())],
        QueryStyle::Exploded | QueryStyle::Commas | QueryStyle::Deep => ",",
        QueryStyle::Spaces => " ",
        QueryStyle::Pipes => "|",
    };
    match (value, argument.style) {
        (Value::Null, _) => Vec::new(),
        (Value::Array(items), QueryStyle::Exploded | QueryStyle::Deep) => {
            items.iter().map(|item| (name(), text(item))).collect()
        }
        (Value::Array(items), _) => vec![(name(), join(items, separator))],
        (Value::Object(fields), QueryStyle::Deep) => {
            let name = |field: &str| format!("{}[{field}]", argument.name);
            let fields = fields.iter();
            fields.map(|(field, it)| (name(field), text(it))).collect()
        }
        (Value::Object(fields), QueryStyle::Exploded) => {
            let fields = fields.iter();
            fields
                .map(|(field, it)| (field.clone(), text(it)))
                .collect()
        }
        (Value::Object(fields), _) => {
            let parts = fields
                .iter()
                .map(|(field, it)| format!("{field}{separator}{}", text(it)));
            vec![(name(), parts.collect::<Vec<_>>().join(separator))]
        }
        _ => vec![(name(), text(value))],
    }
}

fn join(items: &[Value], separator: &str) -> String {
    items.iter().map(text).collect::<Vec<_>>().join(separator)
}

fn text(value: &Value) -> String {
    let mut text = String::new();
    push_value(&mut text, Some(value));
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{HeaderArgument, Placement, QueryArgument, QueryStyle, form};

    #[test]
    fn arguments_cannot_leave_their_position() {
        let argument = |name: &str, style| QueryArgument {
            argument: name.to_owned(),
            name: format!("{name}&="),
            style,
        };
        let placement = Placement {
            query: vec![
                argument("a", QueryStyle::Exploded),
                argument("b", QueryStyle::Pipes),
                argument("c", QueryStyle::Deep),
                argument("d", QueryStyle::Json),
                argument("e", QueryStyle::Exploded),
                argument("none", QueryStyle::Commas),
            ],
            headers: vec![HeaderArgument {
                argument: "a".to_owned(),
                name: "X-A".to_owned(),
            }],
            body: None,
        };
        let arguments = json!({
            "a": ["1&x=2", 3], "b": ["p", "q"], "c": {"k#": "v"}, "d": {"x": [1]}, "e": {"f": "?"}, "none": null,
        });
        let mut url = "https://h/p".to_owned();
        placement.push_query(&mut url, &arguments);
        assert_eq!(
            url,
            "https://h/p?a%26%3D=1%26x%3D2&a%26%3D=3&b%26%3D=p%7Cq&c%26%3D%5Bk%23%5D=v\
             &d%26%3D=%7B%22x%22%3A%5B1%5D%7D&f=%3F"
        );
        assert_eq!(
            placement.headers(&arguments),
            [("X-A", "1&x=2,3".to_owned())]
        );
        assert_eq!(
            form(&json!({"a&": ["1", "="], "n": null})),
            "a%26=1&a%26=%3D"
        );
    }
}
