package lifecycle

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
)

// A stage is a part of what is done to a sandbox: it is measured, and a span of the request's trace.
const (
	stageCreate  = "create" // all of a create, or of a fork's child
	stageAdmit   = "admit"
	stageRow     = "row" // it is written down
	stageMachine = "machine"
	stageEnvd    = "envd"
	stageHook    = "hook"
	stageStart   = "start"
	stagePause   = "pause"
	stageResume  = "resume" // of the machine: envd and the hook are stages of their own
	stageSave    = "save"
	stageRewind  = "rollback"
	stageKill    = "kill"
	stageMember  = "member" // of the pool, from its start until it can be claimed
	stageClaim   = "claim"  // has it go on
)

func newTracer() trace.Tracer {
	return otel.Tracer("github.com/cubesandbox/cube/orchestrator/lifecycle")
}

func newStages() *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "cube_sandbox_stage_seconds",
		Help:    "Time that stages of what is done to sandboxes take.",
		Buckets: []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
	}, []string{"stage", "result"})
}

// stage does one.
func (e *Engine) stage(ctx context.Context, name, id string, do func(context.Context) error) error {
	ctx, span := e.tracer.Start(ctx, "sandbox "+name)
	defer span.End()
	span.SetAttributes(attribute.String("sandbox.id", id))
	began, result := time.Now(), "ok"
	err := do(ctx)
	if name != stageCreate && name != stageAdmit && name != stageRow {
		err = ofMachine(err)
	}
	if err != nil {
		result = "failed"
		span.RecordError(err)
		span.SetStatus(codes.Error, err.Error())
	}
	e.stages.WithLabelValues(name, result).Observe(time.Since(began).Seconds())
	return err
}
