package templates

import (
	"context"

	"github.com/cubesandbox/cube/orchestrator/teams"
)

// Asset is what builds have kept for teams of their steps.
func (b *Builder) Asset() teams.Asset {
	return teams.Asset{Kind: "layer", Remove: b.Purge, List: func(ctx context.Context, team string) (names []string, err error) {
		all, err := b.Layers.Layers(ctx)
		for _, l := range all {
			if l.Team == team {
				names = append(names, l.Snapshot)
			}
		}
		return names, err
	}}
}
