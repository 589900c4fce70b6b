package stack

import (
	"github.com/cubesandbox/cube/orchestrator/api"
	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/machines"
	"github.com/cubesandbox/cube/orchestrator/teams"
	"github.com/cubesandbox/cube/orchestrator/templates"
)

// openAudit opens the record of what is done.
func (s *stack) openAudit() (err error) {
	if s.audit, err = audit.Open(audit.FileOf(s.cfg), s.Log.With("part", "audit")); err != nil {
		return err
	}
	s.undo.Push(s.audit.Close)
	return nil
}

// kept is what is kept of teams' snapshots and paused sandboxes, nil if that is all.
func (s *stack) kept() lifecycle.Kept {
	if s.cfg.Retention.Forever() {
		return nil
	}
	return s.cfg.Retention.Of
}

// openTeams has the API know whose things are.
func (s *stack) openTeams(m *machines.Machines, b *templates.Builder) {
	s.api.OpenTeams(&api.Ownership{DB: s.db, Engine: s.engine, Purger: &teams.Purger{DB: s.db, Audit: s.audit, Assets: s.assets(m, b)}})
}

// assets are all that teams have on this host, in the order in which it can be removed. A package that keeps something else for teams
// has it here, or a purge says that something is left.
func (s *stack) assets(m *machines.Machines, b *templates.Builder) []teams.Asset {
	sandboxes, snapshots := s.engine.Assets()
	jobs, uploads := s.builds.Assets()
	layers := b.Asset()
	sandboxes.Left, snapshots.Left, layers.Left = m.Left, m.LeftSnapshots, m.LeftSnapshots
	return []teams.Asset{jobs, sandboxes, snapshots, layers, uploads, m.Images(), m.Asset()}
}
