//! Describes `GET /runs/{id}/recording` in the OpenAPI document.

use crate::web::openapi::operation::Operation;
use crate::web::routes::recordings::TOML;

const EXAMPLE: &str = r#"version = 1
agent = "critic"
input = "Is the earth flat?"
ignore = []

[expect]
completed = true

[[runs]]
path = "critic"
agent = "critic"
definition = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
model = "anthropic/claude-sonnet-5-5"
system = "You name the weakest points of a draft."
message = "Is the earth flat?"

[[runs.turns]]
turn = 1
reply = "It is a sphere."
stop_reason = "end_turn"
usage = { input = 31, output = 9 }
"#;

pub fn recording(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("get_recording", "Returns the recording of a tree")
        .details(
            "A TOML file for `axed test`: what the models of the tree were sent and what came back, what its tools \
             returned, and what a test expects. Images and files are left out.",
        )
        .text_response(200, TOML, "The recording.")
        .text_example(200, TOML, EXAMPLE)
        .problem(
            409,
            "`not_a_root`: the run is a child. `run_not_terminal`: the run has not ended. `not_recorded`: the record lacks \
             what a recording needs.",
        )
}
