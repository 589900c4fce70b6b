package server

import (
	"fmt"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/cubesandbox/cube/guest-agent/agent/spec"
	"github.com/cubesandbox/cube/guest-agent/api"
)

// rehearse does once what the first use of each message's and of a specification's type does: an emulated CPU has to
// translate that code, which each restored machine would do anew.
func rehearse() error {
	messages := api.File_guest_agent_api_agent_proto.Messages()
	for i := range messages.Len() {
		name := messages.Get(i).FullName()
		t, err := protoregistry.GlobalTypes.FindMessageByName(name)
		if err != nil {
			return fmt.Errorf("rehearse %s: %w", name, err)
		}
		m := t.New().Interface()
		b, err := proto.Marshal(m)
		if err != nil {
			return fmt.Errorf("rehearse %s: %w", name, err)
		}
		if err := proto.Unmarshal(b, m); err != nil {
			return fmt.Errorf("rehearse %s: %w", name, err)
		}
	}
	return spec.Rehearse()
}
