//! Deserializes JSON whose values have other types than expected: numbers and texts stand for each other, `false` and an
//! empty text for null, an empty list for an empty object, one object for a list of one. Of equal keys in an object, the
//! last one that says something counts.

use std::borrow::Cow;
use std::vec;

use serde::de::value::CowStrDeserializer;
use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, Error as _, IntoDeserializer, MapAccess, SeqAccess,
    Unexpected, Visitor,
};
use serde::forward_to_deserialize_any;
use serde_json::value::RawValue;
use serde_json::{Error, Number};

/// Deserializes what the strict form rejects because of a type or a key that comes twice.
pub fn parse<'de, T: Deserialize<'de>>(text: &'de str) -> Result<T, Error> {
    T::deserialize(LenientValue::new(text)?)
}

/// The fields of an object, each key once; `None` if the text is not an object.
pub fn fields(text: &str) -> Option<Vec<(Cow<'_, str>, &RawValue)>> {
    let fields = LenientValue::new(text).ok()?.fields()?;
    Some(fields)
}

/// Whether the value says nothing.
pub fn is_blank(json: &str) -> bool {
    matches!(json, "null" | "false" | "\"\"" | "[]" | "{}")
}

/// One value of valid JSON.
struct LenientValue<'de>(&'de RawValue);

impl<'de> LenientValue<'de> {
    fn new(text: &'de str) -> Result<Self, Error> {
        serde_json::from_str(text).map(Self)
    }

    fn json(&self) -> &'de str {
        self.0.get()
    }

    fn starts_with(&self, byte: char) -> bool {
        self.json().starts_with(byte)
    }

    fn fields(&self) -> Option<Vec<(Cow<'de, str>, &'de RawValue)>> {
        struct FieldsVisitor;
        impl<'de> Visitor<'de> for FieldsVisitor {
            type Value = Vec<(Cow<'de, str>, &'de RawValue)>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields: Self::Value = Vec::new();
                while let Some((Key(key), value)) = map.next_entry::<Key<'de>, &RawValue>()? {
                    match fields.iter_mut().find(|(earlier, _)| *earlier == key) {
                        Some(_) if is_blank(value.get()) => {}
                        Some((_, earlier)) => *earlier = value,
                        None => fields.push((key, value)),
                    }
                }
                Ok(fields)
            }
        }
        serde_json::Deserializer::from_str(self.json())
            .deserialize_map(FieldsVisitor)
            .ok()
    }

    /// The number that it is, or that its text contains.
    fn number(&self) -> Option<Number> {
        let text = match self.starts_with('"') {
            true => serde_json::from_str::<String>(self.json()).ok()?,
            false => self.json().to_owned(),
        };
        let number: Number = serde_json::from_str(text.trim()).ok()?;
        // Some languages have no integers.
        match number.as_f64() {
            Some(float) if number.is_f64() && float.fract() == 0.0 && float.abs() < 9e15 => {
                Some(Number::from(float as i64))
            }
            _ => Some(number),
        }
    }

    fn deserialize_number<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.number() {
            Some(number) => number.deserialize_any(visitor),
            None => self.strict().deserialize_u64(visitor),
        }
    }

    fn strict(&self) -> serde_json::Deserializer<serde_json::de::StrRead<'de>> {
        serde_json::Deserializer::from_str(self.json())
    }
}

/// A key that is borrowed unless it has escapes.
struct Key<'de>(Cow<'de, str>);

impl<'de> Deserialize<'de> for Key<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;
        impl<'de> Visitor<'de> for KeyVisitor {
            type Value = Key<'de>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a key")
            }

            fn visit_borrowed_str<E>(self, key: &'de str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Borrowed(key)))
            }

            fn visit_str<E>(self, key: &str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Owned(key.to_owned())))
            }
        }
        deserializer.deserialize_str(KeyVisitor)
    }
}

macro_rules! numbers {
    ($($method:ident)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            self.deserialize_number(visitor)
        })*
    };
}

impl<'de> Deserializer<'de> for LenientValue<'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.json().as_bytes().first() {
            Some(b'{') => self.deserialize_map(visitor),
            Some(b'[') => self.deserialize_seq(visitor),
            _ => self.strict().deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.json() {
            "null" | "false" => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.json() {
            "null" | "false" => visitor.visit_str(""),
            text if text.starts_with('"') => self.strict().deserialize_str(visitor),
            json => visitor.visit_borrowed_str(json),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_str(visitor)
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.json().trim_matches('"').to_ascii_lowercase().as_str() {
            "true" | "1" => visitor.visit_bool(true),
            "false" | "0" | "null" | "" => visitor.visit_bool(false),
            _ => self.strict().deserialize_bool(visitor),
        }
    }

    numbers!(
        deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64 deserialize_u8 deserialize_u16 deserialize_u32
        deserialize_u64 deserialize_f32 deserialize_f64
    );

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let elements: Vec<&'de RawValue> = match self.json() {
            "null" | "false" | "\"\"" => Vec::new(),
            json if json.starts_with('[') => serde_json::from_str(json)?,
            json if json.starts_with('{') => vec![self.0],
            _ => return self.strict().deserialize_seq(visitor),
        };
        visitor.visit_seq(Elements(elements.into_iter()))
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let fields = match self.fields() {
            Some(fields) => fields,
            None if is_blank(self.json()) => Vec::new(),
            None if self.starts_with('[') => {
                return Err(Error::invalid_type(Unexpected::Seq, &visitor));
            }
            None => return self.strict().deserialize_map(visitor),
        };
        visitor.visit_map(Fields {
            fields: fields.into_iter(),
            value: None,
        })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_map(visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        // Raw JSON is one, and only this deserializer gives it.
        self.strict().deserialize_newtype_struct(name, visitor)
    }

    forward_to_deserialize_any! {
        i128 u128 char bytes byte_buf unit unit_struct tuple tuple_struct enum identifier ignored_any
    }
}

struct Elements<'de>(vec::IntoIter<&'de RawValue>);

impl<'de> SeqAccess<'de> for Elements<'de> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Error> {
        let element = self.0.next();
        element
            .map(|element| seed.deserialize(LenientValue(element)))
            .transpose()
    }
}

struct Fields<'de> {
    fields: vec::IntoIter<(Cow<'de, str>, &'de RawValue)>,
    value: Option<&'de RawValue>,
}

impl<'de> MapAccess<'de> for Fields<'de> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Error> {
        let Some((key, value)) = self.fields.next() else {
            return Ok(None);
        };
        self.value = Some(value);
        let key: CowStrDeserializer<'_, Error> = key.into_deserializer();
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        match self.value.take() {
            Some(value) => seed.deserialize(LenientValue(value)),
            None => Err(Error::custom("a value without its key")),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::value::RawValue;

    use super::{fields, parse};

    #[derive(Debug, Default, Deserialize, PartialEq)]
    struct Inner {
        text: Option<String>,
    }

    #[derive(Debug, Deserialize)]
    struct Outer<'a> {
        id: Option<String>,
        index: Option<u64>,
        done: Option<bool>,
        inner: Option<Inner>,
        list: Option<Vec<Inner>>,
        #[serde(borrow)]
        raw: Option<&'a RawValue>,
    }

    #[test]
    fn other_types_are_read_where_they_mean_the_same() {
        let outer: Outer<'_> = parse(
            r#"{"id": 7, "index": "3", "done": "true", "inner": [], "list": {"text": 1.5}, "raw": {"a": 1.0}, "more": {"a": []}}"#,
        )
        .expect("an object");
        assert_eq!(outer.id.as_deref(), Some("7"));
        assert_eq!((outer.index, outer.done), (Some(3), Some(true)));
        assert_eq!(outer.inner, Some(Inner::default()));
        let text = Some("1.5".to_owned());
        assert_eq!(outer.list, Some(vec![Inner { text }]));
        assert_eq!(outer.raw.map(RawValue::get), Some("{\"a\": 1.0}"));

        let outer: Outer<'_> = parse(
            r#"{"id": false, "index": 2.0, "done": null, "inner": false, "list": "", "raw": null}"#,
        )
        .expect("an object");
        assert_eq!((outer.id, outer.index, outer.done), (None, Some(2), None));
        assert!(outer.inner.is_none() && outer.raw.is_none());
        assert_eq!(outer.list, Some(Vec::new()));
    }

    #[test]
    fn what_cannot_be_meant_is_an_error() {
        for json in [
            r#"{"index": "many"}"#,
            r#"{"index": {}}"#,
            r#"{"inner": "text"}"#,
            r#"{"list": 7}"#,
            r#"[{"id": 1}]"#,
            "7",
            "{",
        ] {
            assert!(parse::<Outer<'_>>(json).is_err(), "{json}");
        }
    }

    #[test]
    fn the_last_of_equal_keys_that_says_something_counts() {
        let inner = |json| parse::<Inner>(json).expect("an object").text;
        assert_eq!(inner(r#"{"text": "a", "text": "b"}"#).as_deref(), Some("b"));
        assert_eq!(inner(r#"{"text": "a", "text": ""}"#).as_deref(), Some("a"));
        assert_eq!(
            inner(r#"{"text": null, "text": "b", "text": null}"#).as_deref(),
            Some("b")
        );
        let keys = fields(r#"{"a": 1, "\u0062": 2, "a": 3}"#).expect("an object");
        let keys = keys.iter().map(|(key, value)| (key.as_ref(), value.get()));
        assert_eq!(keys.collect::<Vec<_>>(), [("a", "3"), ("b", "2")]);
        assert!(fields("[1]").is_none() && fields("{\"a\"").is_none());
    }
}
