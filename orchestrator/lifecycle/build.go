package lifecycle

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/db"
)

// Build asks for a build of a template.
type Build struct {
	Team, Name, Tag string // no Tag is db.DefaultTag
	// Public: all teams may use it.
	Public                 bool
	CPUs, MemoryMB, DiskMB int
}

// Build makes another build of the template that has the name, or the template's first one. save makes the snapshot of a machine
// and proves it; it is nobody's, and deleted, unless it has succeeded. It returns what is known of it, and the size of its disk in
// MiB. Build returns the template's id and the build's.
func (e *Engine) Build(ctx context.Context, b Build, save func(ctx context.Context, snapshot string) (s db.Settings, diskMB int, err error)) (template, build string, err error) {
	id := uuid.NewString()
	defer func() {
		entry := audit.Entry{Action: audit.Build, By: audit.Of(ctx), Team: b.Team, Template: template, Build: id, Snapshot: auditName(b.Name)}
		entry.Result, entry.Error = audit.Outcome(err)
		e.Audit.Record(entry)
	}()
	if err := e.Audit.Ready(); err != nil {
		return "", "", err
	}
	if err := e.Ready(); err != nil {
		return "", "", err
	}
	ref, err := db.ParseRef(b.Name)
	if err != nil {
		return "", "", err
	}
	if b.Tag == "" {
		b.Tag = db.DefaultTag
	}
	record := db.Build{ID: id, Team: b.Team, Key: audit.Of(ctx).Key, Snapshot: buildSnapshot(id), CreatedAt: time.Now(), CPUs: b.CPUs, MemoryMB: b.MemoryMB, DiskMB: b.DiskMB}
	done, err := e.begin(ctx, record)
	if err != nil {
		return "", "", err
	}
	defer done()
	settings, disk, err := save(ctx, record.Snapshot)
	if err != nil {
		return "", "", fmt.Errorf("template %s: %w", b.Name, err)
	}
	if err := e.db.DescribeBuild(ctx, id, disk, settings); err != nil {
		return "", "", err
	}
	template, err = e.db.Publish(ctx, db.Publication{Build: id, Team: b.Team, Name: ref.Name, Template: randomID(20), Tag: b.Tag, Public: b.Public})
	return template, id, err
}

// begin writes a build down. Until done is called nobody takes it for forgotten.
func (e *Engine) begin(ctx context.Context, b db.Build) (done func(), err error) {
	e.mu.Lock()
	e.making[b.ID] = true
	e.mu.Unlock()
	done = func() {
		e.mu.Lock()
		delete(e.making, b.ID)
		e.mu.Unlock()
		e.background(e.sweep)
	}
	if err := e.db.BeginBuild(ctx, b); err != nil {
		done()
		return nil, err
	}
	return done, nil
}
