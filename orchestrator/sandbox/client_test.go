package sandbox

import (
	"net"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
)

// TestGoneIsNamed: an error says that containerd has gone when it has, amid a call or before, and not when containerd says that
// something else isn't there.
func TestGoneIsNamed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	entered := make(chan struct{})
	srv := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
		if method, _ := grpc.MethodFromServerStream(s); method == "/x/Refuse" {
			return status.Error(codes.Unavailable, "the shim isn't there")
		}
		close(entered)
		<-s.Context().Done()
		return nil
	}))
	go srv.Serve(l)
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithChainUnaryInterceptor(nameTheGone(path)))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	call := func(method string, gone bool) {
		t.Helper()
		err := conn.Invoke(t.Context(), method, &emptypb.Empty{}, &emptypb.Empty{})
		if status.Code(err) != codes.Unavailable || strings.Contains(err.Error(), "containerd at "+path+" has gone") != gone {
			t.Errorf("%s: %v", method, err)
		}
	}
	call("/x/Refuse", false)
	go func() {
		<-entered
		srv.Stop()
	}()
	call("/x/Wait", true)
	call("/x/Refuse", true)
}
