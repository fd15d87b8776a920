//! Prints measurements beside their requirements.

use crate::load::Load;

/// Lines of results.
pub struct Table {
    failures: usize,
}

impl Table {
    /// An empty one.
    pub fn new() -> Self {
        Self { failures: 0 }
    }

    /// Begins a part.
    pub fn title(&mut self, text: &str) {
        println!("\n{text}");
    }

    /// A line without a floor.
    pub fn note(&mut self, text: &str) {
        println!("  {text}");
    }

    /// A throughput.
    pub fn throughput(&mut self, name: &str, load: &Load) {
        println!("{}", row(name, load));
    }

    /// A throughput as a part of another, with its floor.
    pub fn ratio(&mut self, name: &str, load: &Load, baseline: &Load, floor: f64) {
        let ratio = load.rate / baseline.rate;
        let verdict = self.verdict(ratio >= floor && load.errors == 0);
        println!(
            "{}   {ratio:.2} of bare (floor {floor:.2}) {verdict}",
            row(name, load)
        );
    }

    /// A throughput with its processor time as a multiple of another one's, and the highest multiple that is allowed.
    pub fn cost(&mut self, name: &str, load: &Load, floor: &Load, limit: Option<f64>) {
        let ratio = load.cpu.as_secs_f64() / floor.cpu.as_secs_f64();
        let verdict = match limit {
            Some(limit) => {
                let is_ok = ratio <= limit && load.errors == 0;
                format!(" (at most {limit}) {}", self.verdict(is_ok))
            }
            None => String::new(),
        };
        println!("{}   {ratio:.2} times bare{verdict}", row(name, load));
    }

    /// A number that must not be above `most`.
    pub fn at_most(&mut self, name: &str, value: f64, max: f64) {
        let verdict = self.verdict(value <= max);
        println!("  {name:<52} {value:>8.2} (at most {max}) {verdict}");
    }

    /// A number without a floor.
    pub fn number(&mut self, name: &str, value: f64) {
        println!("  {name:<52} {value:>8.2}");
    }

    /// The last line.
    pub fn print_verdict(&self) {
        match self.failures {
            0 => println!("\nevery measured floor is held"),
            failures => println!("\n{failures} lines are BELOW FLOOR"),
        }
    }

    fn verdict(&mut self, is_ok: bool) -> &'static str {
        self.failures += usize::from(!is_ok);
        if is_ok { "ok" } else { "BELOW FLOOR" }
    }
}

fn row(name: &str, load: &Load) -> String {
    let errors = match load.errors {
        0 => String::new(),
        errors => format!("  {errors} ERRORS"),
    };
    let cpu = match load.cpu.is_zero() {
        true => String::new(),
        false => format!("  cpu {:>7.1?} each", load.cpu),
    };
    format!(
        "  {name:<36} {:>8.0}/s  median {:>9.3?}  p99 {:>9.3?}{cpu}{errors}",
        load.rate, load.median, load.p99
    )
}
