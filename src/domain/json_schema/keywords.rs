//! The keywords of JSON Schema that contain schemas.

/// Keywords whose value is a schema.
pub const WITH_SCHEMA: [&str; 12] = [
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
];
/// Keywords whose value is a list of schemas.
pub const WITH_LIST: [&str; 4] = ["allOf", "anyOf", "oneOf", "prefixItems"];
/// Keywords whose value has schemas by name, besides `properties` and `$defs`, which their readers treat in ways of their own.
pub const WITH_NAMES: [&str; 3] = ["definitions", "dependentSchemas", "patternProperties"];
