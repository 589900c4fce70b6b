package spec

import (
	"encoding/json"
	"fmt"
	"reflect"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// Resources transforms limits that a container gets while it exists. What devices it may use doesn't change.
func Resources(b []byte) ([]byte, error) {
	var r specs.LinuxResources
	if err := decode(b, &r); err != nil {
		return nil, err
	}
	r.Devices = nil
	if reflect.ValueOf(r).IsZero() {
		return nil, fmt.Errorf("%w: the update names no limit", ErrInvalid)
	}
	return json.Marshal(&r)
}
