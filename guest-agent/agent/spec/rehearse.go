package spec

import (
	"encoding/json"
	"fmt"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// Rehearse decodes and encodes a specification once: what the JSON package finds out about its types, all of them, however
// little is in it, it keeps.
func Rehearse() error {
	var s specs.Spec
	if err := decode([]byte("{}"), &s); err != nil {
		return fmt.Errorf("rehearse a specification: %w", err)
	}
	if _, err := json.Marshal(&s); err != nil {
		return fmt.Errorf("rehearse a specification: %w", err)
	}
	return nil
}
