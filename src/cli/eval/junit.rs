//! The gates of an evaluation as JUnit XML: each is a test. Without gates the evaluation itself is one.

use std::fmt::Write;

use crate::cli::eval::report::EvalReport;
use crate::cli::test::junit::escape;
use crate::domain::evaluation::EvalState;

struct Test<'t> {
    name: &'t str,
    /// Why it failed.
    failure: Option<&'t str>,
}

pub fn to_xml(report: &EvalReport) -> String {
    let gates = report.result.gates.iter();
    let mut tests: Vec<Test<'_>> = gates
        .map(|gate| Test {
            name: &gate.gate,
            failure: (!gate.held).then_some(&*gate.why),
        })
        .collect();
    let is_completed = report.state == EvalState::Completed;
    if tests.is_empty() || !is_completed {
        let reason = match report.text("reason") {
            "" => report.state.as_str(),
            reason => reason,
        };
        tests.push(Test {
            name: "completed",
            failure: (!is_completed).then_some(reason),
        });
    }
    let failures = tests.iter().filter(|test| test.failure.is_some()).count();
    let suite = escape(report.text("agent"));
    let mut xml = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    // Writing to a string cannot fail.
    let _ = writeln!(
        xml,
        "<testsuites>\n<testsuite name=\"axed eval {suite}\" tests=\"{}\" failures=\"{failures}\" errors=\"0\">",
        tests.len()
    );
    for test in &tests {
        let name = escape(test.name);
        let _ = match test.failure.map(escape) {
            None => writeln!(xml, "<testcase name=\"{name}\" classname=\"{suite}\"/>"),
            Some(why) => writeln!(
                xml,
                "<testcase name=\"{name}\" classname=\"{suite}\"><failure message=\"{why}\">{why}</failure></testcase>"
            ),
        };
    }
    xml.push_str("</testsuite>\n</testsuites>\n");
    xml
}
