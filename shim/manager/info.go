package manager

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/v2/version"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	"google.golang.org/protobuf/types/known/anypb"
)

// featuresURL is the type that containerd knows features.Features, in JSON, by.
const featuresURL = "types.containerd.io/opencontainers/runtime-spec/1/features/Features"

// Info describes the runtime.
func (m *Manager) Info(context.Context, io.Reader) (*types.RuntimeInfo, error) {
	no := false
	// containerd asks for one feature and refuses containers that need it where it isn't there.
	f, err := json.Marshal(&features.Features{
		Linux: &features.Linux{MountExtensions: &features.MountExtensions{IDMap: &features.IDMap{Enabled: &no}}},
	})
	if err != nil {
		return nil, fmt.Errorf("describe the features: %w", err)
	}
	return &types.RuntimeInfo{
		Name:     m.Runtime,
		Version:  &types.RuntimeVersion{Version: version.Version, Revision: version.Revision},
		Features: &anypb.Any{TypeUrl: featuresURL, Value: f},
	}, nil
}
