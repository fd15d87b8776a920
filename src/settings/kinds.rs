//! The kinds of settings that agents and the server have in common.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use schemars::{JsonSchema, SchemaGenerator};
use secrecy::SecretString;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value as Json, json};

use crate::settings::choice::Choice;
use crate::settings::document::{Node, Value};
use crate::settings::quantity::format_seconds;
use crate::settings::schema::SectionSchema;
use crate::settings::section::{Audience, Kind, Section, Visitor, show_section};
use crate::settings::table_reader::{MAX_COUNT, TableReader};

/// A kind of values that are shown as they are. The reader gives a value if the table has the key with a right one.
macro_rules! plain_kind {
    ($kind:ty, $type:ty, |$this:ident, $table:ident, $key:ident| $read:block, $schema:expr) => {
        impl Kind<$type> for $kind {
            fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut $type) {
                let read =
                    |$this: &Self, $table: &mut TableReader<'_>, $key| -> Option<$type> { $read };
                set(value, read(self, table, key));
            }

            fn show(&self, value: &$type, _audience: Audience) -> Json {
                json!(value)
            }

            fn schema(&self, _generator: &mut SchemaGenerator) -> Json {
                let $this = self;
                let _ = $this;
                $schema
            }
        }
    };
}

/// A field that is no key of its table. If the table has the key, it belongs in this place.
pub struct Elsewhere(pub Option<&'static str>);

/// A field that no file has.
pub const NOT_A_KEY: Elsewhere = Elsewhere(None);

impl<T> Kind<T> for Elsewhere {
    const IS_KEY: bool = false;

    fn read(&self, table: &mut TableReader<'_>, key: &'static str, _value: &mut T) {
        if let Some(place) = self.0 {
            table.misplaced(key, place);
        }
    }

    fn show(&self, _value: &T, _audience: Audience) -> Json {
        Json::Null
    }

    fn schema(&self, _generator: &mut SchemaGenerator) -> Json {
        Json::Null
    }
}

/// A key that other code reads, and that is shown as it is.
pub struct ReadElsewhere;

impl<T: Serialize + JsonSchema> Kind<T> for ReadElsewhere {
    fn read(&self, _table: &mut TableReader<'_>, _key: &'static str, _value: &mut T) {}

    fn show(&self, value: &T, _audience: Audience) -> Json {
        json!(value)
    }

    fn schema(&self, generator: &mut SchemaGenerator) -> Json {
        generator.subschema_for::<T>().to_value()
    }
}

/// A section in a table of its own.
pub struct Nested;

impl<S: Section> Kind<S> for Nested {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut S) {
        table.nested(key, |table| value.read(table));
    }

    fn show(&self, value: &S, audience: Audience) -> Json {
        Json::Object(show_section(value, audience))
    }

    fn schema(&self, generator: &mut SchemaGenerator) -> Json {
        generator.subschema_for::<SectionSchema<S>>().to_value()
    }

    fn visit_section<V: Visitor>(&self, visitor: &mut V) -> bool {
        S::default().visit(visitor);
        true
    }
}

/// A section that is there if this holds for it.
pub struct NestedIf<S>(pub fn(&S) -> bool);

impl<S: Section> Kind<Option<S>> for NestedIf<S> {
    const OMITS_NULL: bool = true;

    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut Option<S>) {
        *value = table.nested(key, |table| {
            let mut section = S::default();
            let errors_before = table.count_problems();
            section.read(table);
            let is_there = (self.0)(&section);
            if !is_there {
                // It may name what does not exist yet.
                table.remove_wrong_references(errors_before);
            }
            is_there.then_some(section)
        });
    }

    fn show(&self, value: &Option<S>, audience: Audience) -> Json {
        let shown = value
            .as_ref()
            .map(|section| show_section(section, audience));
        shown.map_or(Json::Null, Json::Object)
    }

    fn schema(&self, generator: &mut SchemaGenerator) -> Json {
        generator.subschema_for::<SectionSchema<S>>().to_value()
    }

    fn visit_section<V: Visitor>(&self, visitor: &mut V) -> bool {
        S::default().visit(visitor);
        true
    }
}

/// A string; of an optional one, a blank text means unset.
pub struct Text;

plain_kind!(
    Text,
    String,
    |_this, table, key| { table.text(key) },
    json!({"type": "string"})
);

plain_kind!(
    Text,
    Option<String>,
    |_this, table, key| {
        table
            .text(key)
            .map(|text| Some(text).filter(|text| !text.trim().is_empty()))
    },
    nullable_text()
);

/// A text that is parsed. The error follows the key: `must be a path`.
pub struct Parsed<T>(pub fn(&str) -> Result<T, String>);

impl<T: Serialize> Kind<T> for Parsed<T> {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut T) {
        set(value, table.parsed_text(key, self.0));
    }

    fn show(&self, value: &T, _audience: Audience) -> Json {
        json!(value)
    }

    fn schema(&self, _generator: &mut SchemaGenerator) -> Json {
        json!({"type": "string"})
    }
}

impl<T: Serialize> Kind<Option<T>> for Parsed<T> {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut Option<T>) {
        *value = table.parsed_text(key, self.0).or(value.take());
    }

    fn show(&self, value: &Option<T>, _audience: Audience) -> Json {
        json!(value)
    }

    fn schema(&self, _generator: &mut SchemaGenerator) -> Json {
        nullable_text()
    }
}

/// A text that may hold a secret. The error follows the key.
pub struct Secret(pub fn(&str) -> Result<String, String>);

impl Kind<Option<SecretString>> for Secret {
    fn read(
        &self,
        table: &mut TableReader<'_>,
        key: &'static str,
        value: &mut Option<SecretString>,
    ) {
        *value = table.parsed_text(key, self.0).map(SecretString::from);
    }

    fn show(&self, _value: &Option<SecretString>, _audience: Audience) -> Json {
        Json::Null
    }

    fn schema(&self, _generator: &mut SchemaGenerator) -> Json {
        nullable_text()
    }
}

/// A key that needs a reader of its own.
pub struct ReadBy<T>(pub fn(&mut TableReader<'_>, &'static str) -> T);

impl<T> Kind<T> for ReadBy<T> {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut T) {
        *value = (self.0)(table, key);
    }

    fn show(&self, _value: &T, _audience: Audience) -> Json {
        Json::Null
    }

    fn schema(&self, _generator: &mut SchemaGenerator) -> Json {
        json!({})
    }
}

/// A path that may begin with `~`.
pub struct FilePath;

plain_kind!(
    FilePath,
    PathBuf,
    |_this, table, key| {
        let home = table.home().map(Path::to_owned);
        table.parsed_text(key, |text| resolve_path(text, home.as_deref()))
    },
    json!({"type": "string"})
);

plain_kind!(
    FilePath,
    Vec<PathBuf>,
    |_this, table, key| {
        let home = table.home().map(Path::to_owned);
        let resolve = |text: &String| resolve_path(text, home.as_deref());
        table.checked_list(key, |texts| texts.iter().map(resolve).collect())
    },
    texts_schema()
);

plain_kind!(
    FilePath,
    Option<PathBuf>,
    |_this, table, key| {
        let text = table.text(key)?;
        let text = Some(text).filter(|text| !text.trim().is_empty());
        Some(text.map(|text| expand_home(&text, table.home())))
    },
    nullable_text()
);

pub struct Flag;

plain_kind!(
    Flag,
    bool,
    |_this, table, key| { table.flag(key) },
    json!({"type": "boolean"})
);

/// A list of strings as written.
pub struct Texts;

plain_kind!(
    Texts,
    Vec<String>,
    |_this, table, key| { table.text_list(key) },
    texts_schema()
);

/// A list of strings, each once, that are checked together. The error follows the key.
pub struct Unique(pub fn(Vec<String>) -> Result<Vec<String>, String>);

plain_kind!(
    Unique,
    Vec<String>,
    |this, table, key| {
        let texts = table.checked_list(key, this.0)?;
        let mut seen = BTreeSet::new();
        let is_new = |text: &String| seen.insert(text.clone());
        Some(texts.into_iter().filter(is_new).collect())
    },
    texts_schema()
);

/// A JSON Schema of objects, as a table or as JSON text.
pub struct ObjectSchema;

plain_kind!(
    ObjectSchema,
    Option<Arc<RawValue>>,
    |_this, table, key| {
        let node = table.take_node(key)?;
        let read = read_object_schema(&node);
        Some(
            read.map_err(|why| table.push_invalid(&node, key, &why))
                .ok(),
        )
    },
    json!({"type": ["object", "null"], "additionalProperties": {}})
);

/// A JSON Schema of objects that nobody has compiled yet.
///
/// # Errors
/// The second half of a sentence that begins with the key.
pub fn read_object_schema(node: &Node) -> Result<Arc<RawValue>, String> {
    let schema = read_schema(node)?;
    let parsed: Json = serde_json::from_str(schema.get()).unwrap_or_default();
    match parsed.get("type").and_then(Json::as_str) {
        Some("object") => Ok(schema),
        _ => Err("must have type = \"object\": its properties are the fields".to_owned()),
    }
}

/// A JSON Schema that nobody has compiled yet.
///
/// # Errors
/// The second half of a sentence that begins with the key.
pub fn read_schema(node: &Node) -> Result<Arc<RawValue>, String> {
    let schema = match &node.value {
        Value::Table(_) => node.to_json(),
        Value::String(text) => {
            serde_json::from_str(text).map_err(|error| format!("is text, but no JSON: {error}"))?
        }
        _ => return Err("must be a table, or JSON text".to_owned()),
    };
    if !schema.is_object() {
        return Err("must be a JSON object".to_owned());
    }
    let raw = serde_json::value::to_raw_value(&schema).map_err(|error| error.to_string())?;
    Ok(Arc::from(raw))
}

/// An enum; an optional one is unset if the key is absent.
pub struct OneOf;

impl<T: Choice + JsonSchema> Kind<T> for OneOf {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut T) {
        set(value, table.choice(key));
    }

    fn show(&self, value: &T, _audience: Audience) -> Json {
        json!(value.name())
    }

    fn schema(&self, generator: &mut SchemaGenerator) -> Json {
        generator.subschema_for::<T>().to_value()
    }
}

impl<T: Choice + JsonSchema> Kind<Option<T>> for OneOf {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut Option<T>) {
        *value = table.choice(key);
    }

    fn show(&self, value: &Option<T>, _audience: Audience) -> Json {
        json!(value.map(T::name))
    }

    fn schema(&self, generator: &mut SchemaGenerator) -> Json {
        generator.subschema_for::<Option<T>>().to_value()
    }
}

/// A whole number in a range. An optional one is unset by 0.
pub struct Whole(pub RangeInclusive<u64>);

/// A type of whole numbers.
pub trait WholeNumber: Copy + TryFrom<u64> + TryInto<u64> {}

impl WholeNumber for u8 {}
impl WholeNumber for u32 {}
impl WholeNumber for u64 {}
impl WholeNumber for usize {}

impl Whole {
    fn read_number<T: WholeNumber>(
        &self,
        table: &mut TableReader<'_>,
        key: &'static str,
    ) -> Option<T> {
        T::try_from(table.integer(key, self.0.clone())?).ok()
    }

    /// Omits a maximum that only prevents overflow.
    fn range_schema(&self) -> Json {
        let (min, max) = (*self.0.start(), *self.0.end());
        let mut schema = json!({"type": "integer", "format": "int64", "minimum": min});
        if max <= MAX_COUNT {
            schema["maximum"] = max.into();
        }
        schema
    }
}

fn show_number<T: WholeNumber>(number: T) -> Json {
    json!(number.try_into().unwrap_or(u64::MAX))
}

impl<T: WholeNumber> Kind<T> for Whole {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut T) {
        set(value, self.read_number(table, key));
    }

    fn show(&self, value: &T, _audience: Audience) -> Json {
        show_number(*value)
    }

    fn schema(&self, _generator: &mut SchemaGenerator) -> Json {
        self.range_schema()
    }
}

impl<T: WholeNumber> Kind<Option<T>> for Whole {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut Option<T>) {
        if let Some(number) = table.integer(key, self.0.clone()) {
            *value = T::try_from(number).ok().filter(|_| number > 0);
        }
    }

    fn show(&self, value: &Option<T>, _audience: Audience) -> Json {
        match value {
            Some(number) => show_number(*number),
            None if self.0.contains(&0) => json!(0),
            None => Json::Null,
        }
    }

    fn schema(&self, _generator: &mut SchemaGenerator) -> Json {
        self.range_schema()
    }
}

/// A count; 0 means no limit.
pub struct Limit;

impl Kind<usize> for Limit {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut usize) {
        match table.count(key, 0) {
            Some(0) => *value = usize::MAX,
            count => set(value, count),
        }
    }

    fn show(&self, value: &usize, _audience: Audience) -> Json {
        match *value {
            usize::MAX => json!(0),
            count => json!(count),
        }
    }

    fn schema(&self, _generator: &mut SchemaGenerator) -> Json {
        Whole(0..=MAX_COUNT).range_schema()
    }
}

/// A number in a range.
pub struct Number(pub RangeInclusive<f64>);

impl Number {
    fn range_schema(&self) -> Json {
        json!({"type": "number", "minimum": self.0.start(), "maximum": self.0.end()})
    }
}

plain_kind!(
    Number,
    f64,
    |this, table, key| { table.number(key, this.0.clone()) },
    this.range_schema()
);

plain_kind!(
    Number,
    Option<f64>,
    |this, table, key| { table.number(key, this.0.clone()).map(Some) },
    this.range_schema()
);

/// Whole seconds, at least this many; of an optional time, 0 means unset.
pub struct Seconds(pub u64);

impl Kind<Duration> for Seconds {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut Duration) {
        set(value, table.seconds(key, self.0));
    }

    fn show(&self, value: &Duration, _audience: Audience) -> Json {
        json!(value.as_secs())
    }

    fn schema(&self, _generator: &mut SchemaGenerator) -> Json {
        Whole(self.0..=MAX_COUNT).range_schema()
    }
}

impl Kind<Option<Duration>> for Seconds {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut Option<Duration>) {
        if let Some(time) = table.seconds(key, self.0) {
            *value = Some(time).filter(|time| !time.is_zero());
        }
    }

    fn show(&self, value: &Option<Duration>, _audience: Audience) -> Json {
        json!(value.map_or(0, |time| time.as_secs()))
    }

    fn schema(&self, _generator: &mut SchemaGenerator) -> Json {
        Whole(self.0..=MAX_COUNT).range_schema()
    }
}

/// Whole milliseconds in a range.
pub struct Milliseconds(pub RangeInclusive<u64>);

impl Kind<Duration> for Milliseconds {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut Duration) {
        let read = table.integer(key, self.0.clone());
        set(value, read.map(Duration::from_millis));
    }

    fn show(&self, value: &Duration, _audience: Audience) -> Json {
        json!(value.as_millis())
    }

    fn schema(&self, _generator: &mut SchemaGenerator) -> Json {
        Whole(self.0.clone()).range_schema()
    }
}

/// A duration such as `30d`; 0 means unset.
pub struct Age;

impl Kind<Option<Duration>> for Age {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut Option<Duration>) {
        if let Some(age) = table.age(key) {
            *value = Some(age).filter(|age| !age.is_zero());
        }
    }

    fn show(&self, value: &Option<Duration>, _audience: Audience) -> Json {
        value.map_or(json!(0), |age| json!(format_seconds(age.as_secs())))
    }

    fn schema(&self, _generator: &mut SchemaGenerator) -> Json {
        json!({"type": ["string", "integer"]})
    }
}

/// A size in bytes, at least 1, such as `4 MiB`.
pub struct Size;

plain_kind!(
    Size,
    usize,
    |_this, table, key| { table.size(key) },
    json!({"type": ["string", "integer"]})
);

fn set<T>(field: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *field = value;
    }
}

pub fn texts_schema() -> Json {
    json!({"type": "array", "items": {"type": "string"}})
}

pub fn nullable_text() -> Json {
    json!({"type": ["string", "null"]})
}

/// The path of the server. The error follows the key.
pub fn resolve_path(text: &str, home: Option<&Path>) -> Result<PathBuf, String> {
    if text.trim().is_empty() {
        return Err("must not be an empty path".to_owned());
    }
    if home.is_none() && (text == "~" || text.starts_with("~/")) {
        return Err("starts with ~, but HOME is not set; write the absolute path".to_owned());
    }
    Ok(expand_home(text, home))
}

/// Expands `~` and `~/…`. Other paths, and all paths if `home` is `None`, stay as they are.
pub fn expand_home(path: &str, home: Option<&Path>) -> PathBuf {
    match (path.strip_prefix('~'), home) {
        (Some(""), Some(home)) => home.to_owned(),
        (Some(rest), Some(home)) if rest.starts_with('/') => {
            home.join(rest.trim_start_matches('/'))
        }
        _ => PathBuf::from(path),
    }
}

/// Checks that the text can be the name of an environment variable.
///
/// # Errors
/// A message that follows the key's name.
pub fn check_variable_name(text: &str) -> Result<String, String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let is_name = !text.is_empty()
        && text.chars().all(is_plain)
        && !text.starts_with(|c: char| c.is_ascii_digit());
    match is_name {
        true => Ok(text.to_owned()),
        // The text may be the secret itself, so the error must not repeat it.
        false => {
            Err("must be the name of an environment variable, and not the secret itself".to_owned())
        }
    }
}
