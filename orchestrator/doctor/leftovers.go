package doctor

import (
	"context"
	"strings"
	"time"

	"github.com/docker/go-units"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/leftover"
)

// Fix removes what the stack has left and nobody owns, and returns a finding for each: Fixed, or Warn and why not.
func Fix(ctx context.Context, cfg *config.Config) (out []Finding) {
	leftover.RemoveAll(ctx, cfg, func(l leftover.Leftover, err error) {
		f := found(l)
		f.Level, f.Remedy = Fixed, ""
		if err != nil {
			f.Level, f.Detail, f.Remedy = Warn, f.Detail+", can't be removed: "+err.Error(), "try again, or `cube down`"
		}
		out = append(out, f)
	})
	return out
}

func judgeLeftovers(r leftover.Report) (out []Finding) {
	for _, l := range r.Found {
		out = append(out, found(l))
	}
	switch {
	case r.Err != nil:
		out = append(out, Finding{Level: Warn, Name: "leftovers", Detail: "not all could be looked for: " + r.Err.Error(), Remedy: "try again"})
	case len(out) == 0 && r.Blind == nil:
		out = append(out, Finding{Level: OK, Name: "leftovers", Detail: "none"})
	case len(out) == 0:
		out = append(out, Finding{Level: OK, Name: "leftovers", Detail: "none that show without containerd"})
	}
	return out
}

// found is the finding of a leftover.
func found(l leftover.Leftover) Finding {
	f := Finding{Level: Left, Name: l.Kind, Remedy: l.Remedy, Bytes: l.Size}
	if !l.Stays {
		f.Remedy = "`cube doctor --fix` " + l.Remedy
	}
	parts := []string{l.Name + ": " + l.Detail}
	if l.Size > 0 {
		parts = append(parts, units.BytesSize(float64(l.Size)))
	}
	if !l.Since.IsZero() {
		f.Since = &l.Since
		parts = append(parts, "since "+l.Since.Format(time.DateTime))
	}
	f.Detail = strings.Join(parts, ", ")
	return f
}
