//! The interval of a difference between two versions, drawn around zero.

use maud::{Markup, html};

use crate::domain::comparison::Comparison;
use crate::web::console::format;

/// The size in the drawing's own units.
const WIDTH: f64 = 240.0;
const HEIGHT: f64 = 22.0;
/// What is left free at both ends, for the marks.
const MARGIN: f64 = 6.0;

/// Half the width of a drawing, as a difference. Scores from 0 to 1 share one scale; others have one each.
pub fn reach_of(comparison: &Comparison, all: &[&Comparison]) -> f64 {
    let own = reach(comparison);
    match own <= 1.0 {
        true => all
            .iter()
            .map(|it| reach(it))
            .filter(|reach| *reach <= 1.0)
            .fold(own, f64::max),
        false => own,
    }
}

fn reach(comparison: &Comparison) -> f64 {
    let ends = [comparison.low, comparison.high].into_iter().flatten();
    ends.fold(0.0, |reach, end| reach.max(end.abs()))
}

/// The interval as a line with a point at the difference; in color only where it excludes zero.
pub fn render(comparison: &Comparison, reach: f64) -> Markup {
    let (Some(difference), Some(low), Some(high)) =
        (comparison.difference, comparison.low, comparison.high)
    else {
        return html! { span.muted { "–" } };
    };
    let (middle, half) = (WIDTH / 2.0, HEIGHT / 2.0);
    let at = |value: f64| match reach > 0.0 {
        true => middle + value / reach * (middle - MARGIN),
        false => middle,
    };
    let x = |value: f64| format!("{:.1}", at(value));
    let text = format!("{} to {}", format::signed(low), format::signed(high));
    html! {
        svg class={ "interval " (verdict(comparison)) } viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) width=(WIDTH) height=(HEIGHT) role="img" aria-label=(text) {
            title { (text) }
            line class="zero" x1=(middle) x2=(middle) y1="0" y2=(HEIGHT) {}
            line class="range" x1=(x(low)) x2=(x(high)) y1=(half) y2=(half) {}
            @for end in [low, high] { line class="range" x1=(x(end)) x2=(x(end)) y1=(half - 4.0) y2=(half + 4.0) {} }
            circle cx=(x(difference)) cy=(half) r="4.5" {}
        }
    }
}

/// `better` or `worse` where the interval excludes zero, else `even`.
pub fn verdict(comparison: &Comparison) -> &'static str {
    match (comparison.low, comparison.high) {
        (Some(low), _) if low > 0.0 => "better",
        (_, Some(high)) if high < 0.0 => "worse",
        _ => "even",
    }
}

#[cfg(test)]
mod tests {
    use super::{reach_of, render};
    use crate::domain::comparison::Comparison;

    fn interval(low: f64, high: f64) -> Comparison {
        Comparison {
            difference: Some((low + high) / 2.0),
            low: Some(low),
            high: Some(high),
            ..Comparison::default()
        }
    }

    #[test]
    fn an_interval_is_drawn_around_zero() {
        let drawing = render(&interval(-0.1, 0.3), 0.5).into_string();
        for part in ["interval even", "x1=\"97.2\" x2=\"188.4\"", "−0.1 to +0.3"] {
            assert!(drawing.contains(part), "{part} is missing in {drawing}");
        }
        let class = |low, high| render(&interval(low, high), 1.0).into_string();
        assert!(class(0.1, 0.3).contains("interval better"));
        assert!(class(-0.3, -0.1).contains("interval worse"));
        assert!(class(0.0, 0.0).contains("interval even"));
        assert!(
            render(&Comparison::default(), 0.0)
                .into_string()
                .contains('–')
        );
    }

    #[test]
    fn scores_from_0_to_1_share_a_scale() {
        let (small, large, tokens) = (
            interval(-0.1, 0.1),
            interval(-0.5, 0.2),
            interval(-9.0, 40.0),
        );
        let all = [&small, &large, &tokens];
        assert_eq!(all.map(|it| reach_of(it, &all)), [0.5, 0.5, 40.0]);
    }
}
