//! The secrets of one connection: expanded from variables when it is opened, redacted from every text about it and from
//! the results of its tools.

use std::collections::{BTreeMap, BTreeSet};

use secrecy::ExposeSecret;

use crate::config::environment::Environment;
use crate::config::secrets::{read_secret, secret_file};
use crate::domain::mcp::Template;

/// A shorter value is not secret, and would match in any text.
const MIN_SECRET_BYTES: usize = 8;
/// A shorter value of a variable is hardly a token, and results may contain it as ordinary text.
const MIN_RESULT_SECRET_BYTES: usize = 16;
/// Stands for a secret.
const MASK: &str = "***";

/// The environment with the secrets of files that these templates need.
///
/// # Errors
/// A file that cannot be used.
pub async fn read_secret_files(
    templates: &BTreeMap<String, Template>,
    environment: &Environment,
) -> Result<Environment, String> {
    let names = templates.values().flat_map(Template::variables);
    let names: BTreeSet<String> = names
        .filter(|name| secret_file(environment, name).is_some())
        .map(str::to_owned)
        .collect();
    let mut environment = environment.clone();
    if names.is_empty() {
        return Ok(environment);
    }
    let read = move || -> Result<Environment, String> {
        for name in names {
            let secret = read_secret(&environment, &name).map_err(|error| error.to_string())?;
            environment.extend(secret.map(|it| (name, it.expose_secret().to_owned())));
        }
        Ok(environment)
    };
    match tokio::task::spawn_blocking(read).await {
        Ok(result) => result,
        Err(error) => Err(format!("its secrets cannot be read: {error}")),
    }
}

/// Where templates of a server are written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum TemplateTable {
    Env,
    Headers,
}

impl TemplateTable {
    fn name(self) -> &'static str {
        match self {
            Self::Env => "env",
            Self::Headers => "headers",
        }
    }
}

/// The values to redact.
#[derive(Clone, Default)]
pub struct Secrets {
    values: Vec<String>,
    /// Those that are redacted from results, too: secrets of files, and values of variables that may be tokens. A text of
    /// the definition may be a directory that results name.
    result_values: Vec<String>,
}

impl Secrets {
    /// Expands the variables in the templates. Each variable's value becomes a secret, and so does each result, except text of an
    /// `env` table without variables.
    ///
    /// # Errors
    /// The first variable that is not set, and the key that needs it.
    pub fn expand_templates(
        &mut self,
        table: TemplateTable,
        templates: &BTreeMap<String, Template>,
        environment: &Environment,
    ) -> Result<Vec<(String, String)>, String> {
        let mut texts = Vec::with_capacity(templates.len());
        for (key, template) in templates {
            let variable = |name: &str| {
                let value = environment.get(name).map(String::as_str);
                value.filter(|value| !value.is_empty())
            };
            let expanded = template.expand(variable).map_err(|name| {
                let table = table.name();
                format!("its {table}.{key} needs the variable {name}, which the daemon's environment does not have")
            })?;
            for (name, value) in template.variables().zip(&expanded.variable_values) {
                if secret_file(environment, name).is_some() {
                    self.result_values.push(value.clone());
                }
                self.result_values.extend(tokens(value).map(str::to_owned));
            }
            if table == TemplateTable::Headers || !expanded.variable_values.is_empty() {
                self.values.push(expanded.text.clone());
            }
            self.values.extend(expanded.variable_values);
            texts.push((key.clone(), expanded.text));
        }
        for values in [&mut self.values, &mut self.result_values] {
            values.retain(|value| value.len() >= MIN_SECRET_BYTES);
            // The longest come first, because a value may be part of another.
            values.sort_by_key(|value| std::cmp::Reverse(value.len()));
            values.dedup();
        }
        Ok(texts)
    }

    /// Adds a secret. The next [`Secrets::expand_templates`] sorts it in.
    pub fn add(&mut self, value: &str) {
        if value.len() >= MIN_SECRET_BYTES {
            self.values.push(value.to_owned());
        }
    }

    /// Leaves these values in results.
    pub fn show_in_results<'v>(&mut self, values: impl Iterator<Item = &'v String>) {
        for token in values.flat_map(|value| tokens(value)) {
            self.result_values.retain(|it| it != token);
        }
    }

    /// The result of a tool with every secret that results must not show replaced by `***`.
    pub fn redact_result(&self, text: String) -> String {
        let values = self.result_values.iter();
        values.fold(text, |text, value| match text.contains(value) {
            true => text.replace(value, MASK),
            false => text,
        })
    }

    /// The text with every secret replaced by `***`, also where the text was cut within one.
    pub fn redact(&self, text: &str) -> String {
        let values = self.values.iter();
        values.fold(text.to_owned(), |text, value| redact_value(text, value))
    }
}

/// The parts of a variable's value that may be secrets.
fn tokens(value: &str) -> impl Iterator<Item = &str> {
    value.split_whitespace().filter(|word| may_be_token(word))
}

/// Whether a word may be a secret, and not a path or an address.
fn may_be_token(word: &str) -> bool {
    // Base64 may begin with a slash.
    let is_absolute = |rest: &str| rest.contains('/') && !rest.contains(['+', '=']);
    let is_path = word.starts_with("./") || word.strip_prefix('/').is_some_and(is_absolute);
    // User information, a query and a fragment may hold a secret.
    let is_address = word
        .split_once("://")
        .is_some_and(|(_, rest)| !rest.contains(['@', '?', '#']));
    word.len() >= MIN_RESULT_SECRET_BYTES && !is_path && !is_address
}

/// Replaces a secret by `***`, and also its beginning if that has at least half of it: the rest may have been cut off.
pub fn redact_value(mut text: String, value: &str) -> String {
    if text.contains(value) {
        text = text.replace(value, MASK);
    }
    let half = MIN_SECRET_BYTES.max(value.len().div_ceil(2));
    let half = (half..value.len()).find(|at| value.is_char_boundary(*at));
    let Some(beginning) = half.map(|half| &value[..half]) else {
        return text;
    };
    if !text.contains(beginning) {
        return text;
    }
    let mut redacted = String::with_capacity(text.len());
    let mut rest = text.as_str();
    while let Some(at) = rest.find(beginning) {
        redacted.push_str(&rest[..at]);
        redacted.push_str(MASK);
        let found = rest[at..].chars().zip(value.chars());
        let same = found.take_while(|(found, wanted)| found == wanted);
        rest = &rest[at + same.map(|(found, _)| found.len_utf8()).sum::<usize>()..];
    }
    redacted + rest
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::{Secrets, TemplateTable, redact_value};
    use crate::domain::mcp::Template;

    #[test]
    fn secret_values_are_redacted() {
        let environment = BTreeMap::from([("TOKEN".to_owned(), "s3cret-token".to_owned())]);
        let read = |text| Template::parse(text).expect("a template");
        let templates = BTreeMap::from([
            ("Authorization".to_owned(), read("Bearer ${TOKEN}")),
            ("X-Short".to_owned(), read("on")),
        ]);
        let mut secrets = Secrets::default();
        let expanded = secrets
            .expand_templates(TemplateTable::Headers, &templates, &environment)
            .expect("it is set");
        assert_eq!(expanded[0].1, "Bearer s3cret-token");
        let redacted = secrets.redact("no one on earth: Bearer s3cret-token, s3cret-token");
        assert_eq!(redacted, "no one on earth: ***, ***");
        let mut in_a_query = Secrets::default();
        in_a_query.add("key=s3cret-token&for=me");
        in_a_query
            .expand_templates(TemplateTable::Headers, &templates, &environment)
            .expect("it is set");
        assert_eq!(in_a_query.redact("?key=s3cret-token&for=me"), "?***");
        let missing =
            secrets.expand_templates(TemplateTable::Headers, &templates, &BTreeMap::new());
        assert_eq!(
            missing.expect_err("not set"),
            "its headers.Authorization needs the variable TOKEN, which the daemon's environment does not have"
        );
    }

    /// The results' text, redacted by a server's variables with these values.
    fn redacted(environment: &[(&str, &str)], templates: &[&str], result: &str) -> String {
        let environment = environment.iter();
        let environment: BTreeMap<String, String> = environment
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        let templates = templates.iter().enumerate();
        let templates: BTreeMap<String, Template> = templates
            .map(|(at, text)| (at.to_string(), Template::parse(text).expect("a template")))
            .collect();
        let mut secrets = Secrets::default();
        secrets
            .expand_templates(TemplateTable::Env, &templates, &environment)
            .expect("they are set");
        secrets.show_in_results(environment.get("USER").into_iter());
        secrets.redact_result(result.to_owned())
    }

    #[test]
    fn only_values_of_variables_are_redacted_from_results() {
        let environment = [
            ("TOKEN", "s3cret-of-the-service"),
            ("USER", "operator-of-the-machine"),
        ];
        let templates = ["key ${TOKEN}", "${USER}", "notes-of-the-company"];
        let result =
            "notes-of-the-company\noperator-of-the-machine\nkey s3cret-of-the-service, s3cret-of";
        assert_eq!(
            redacted(&environment, &templates, result),
            "notes-of-the-company\noperator-of-the-machine\nkey ***, s3cret-of"
        );
    }

    #[test]
    fn text_of_a_file_is_a_secret_only_in_headers() {
        let template = Template::parse("literal-of-the-file").expect("a template");
        let templates = BTreeMap::from([("A".to_owned(), template)]);
        for (table, expected) in [
            (TemplateTable::Env, "literal-of-the-file"),
            (TemplateTable::Headers, "***"),
        ] {
            let mut secrets = Secrets::default();
            secrets
                .expand_templates(table, &templates, &BTreeMap::new())
                .expect("no variables");
            assert_eq!(secrets.redact("literal-of-the-file"), expected);
        }
    }

    #[test]
    fn values_that_are_no_tokens_stay_in_results() {
        for (value, is_shown) in [
            ("us-east-1", true),
            ("12345678", true),
            ("fifteen-letters", true),
            ("sixteen--letters", false),
            ("/srv/papers/of/the/company", true),
            ("./papers/of/the/company", true),
            ("The Example Company", true),
            ("https://example.com/v1/notes", true),
            ("https://example.com/v1?key=s3cret", false),
            ("https://example.com/v1#s3cret", false),
            ("postgres://me:s3cret@db/notes", false),
            ("/wJalrXUtnFEMIK7MDENGbPxRfiCY", false),
            ("/wJalrXUtnFEMI/K7MDENG+bPxRfiCY=", false),
        ] {
            let expected = if is_shown { value } else { "***" };
            let result = redacted(&[("VALUE", value)], &["${VALUE}"], value);
            assert_eq!(result, expected, "{value}");
        }
    }

    #[test]
    fn words_of_a_value_are_redacted_from_results() {
        let environment = [("AUTH", "Bearer s3cret-of-the-service")];
        let result = "Bearer s3cret-of-the-service, s3cret-of-the-service";
        assert_eq!(
            redacted(&environment, &["${AUTH}"], result),
            "Bearer ***, ***"
        );
    }

    #[test]
    fn secrets_of_files_are_always_redacted_from_results() {
        let environment = [("PIN", "12345678"), ("PIN_FILE", "/run/secrets/pin")];
        assert_eq!(redacted(&environment, &["${PIN}"], "is 12345678"), "is ***");
    }

    #[test]
    fn a_secret_that_was_cut_leaves_no_long_beginning() {
        let redact = |text: &str| redact_value(text.to_owned(), "0123456789abcdefghij");
        assert_eq!(redact("key: 0123456789abcdefghi"), "key: ***");
        assert_eq!(
            redact("0123456789abcdefghij and 0123456789a…"),
            "*** and ***…"
        );
        assert_eq!(redact("0123456789 is less"), "*** is less");
        assert_eq!(redact("012345678 is less"), "012345678 is less");
        let umlauts = |text: &str| redact_value(text.to_owned(), "äöüäöüäöü");
        assert_eq!(umlauts("äöüäöüß"), "***ß");
    }
}
