"""A program as XLA for TPUs prints them, small enough to work out by hand."""

TEXT = """\
HloModule jit_train_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%async_collective_fusion.1 (p: bf16[64,128]) -> bf16[64,128] {
  %p = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.2 = bf16[256,128]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, \
replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}
}

%gathering (p: bf16[64,128]) -> bf16[256,128] {
  %p = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.1 = bf16[256,128]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, \
replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}
}

%body (state: (s32[], f32[3,100,128], f32[8,128])) -> (s32[], f32[3,100,128], f32[8,128]) {
  %state = (s32[], f32[3,100,128]{2,1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %fetch = (f32[8,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%state)
  %work = f32[8,128]{1,0:T(8,128)} fusion(%state), kind=kLoop, calls=%add, \
metadata={op_name="jit(train_step)/jvp()/while/body/dot"}, backend_config={"estimated_cycles":"1000"}
  %fetched = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%fetch)
  %all-reduce.1 = f32[8,128]{1,0:T(8,128)} all-reduce(%work), channel_id=3, replica_groups=[2,4]<=[8], to_apply=%add, \
metadata={op_name="jit(train_step)/sum"}
  ROOT %next = (s32[], f32[3,100,128], f32[8,128]) tuple(%state, %state, %all-reduce.1)
}

%condition (state: (s32[], f32[3,100,128], f32[8,128])) -> pred[] {
  %state = (s32[], f32[3,100,128]{2,1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %length = s32[]{:T(128)} constant(3)
  %counter = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %less = pred[]{:T(512)} compare(%counter, %length), direction=LT
}

ENTRY %main (param.0: f32[12,100], param.1: f32[12,100], param.2: u8[4,8,8,3]) -> f32[8,128] {
  %param.0 = f32[12,100]{1,0:T(8,128)} parameter(0), metadata={op_name="state.model.head.kernel.value"}
  %param.1 = f32[12,100]{1,0:T(8,128)} parameter(1), metadata={op_name="state.optimizer[0].mu.head.kernel.value"}
  %param.2 = u8[4,8,8,3]{3,2,1,0:T(8,128)} parameter(2), metadata={op_name="batch.image_BHWC"}
  %zero = s32[]{:T(128)} constant(0)
  %kept = f32[3,100,128]{2,1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer"
  %first = f32[8,128]{1,0:T(8,128)} fusion(%param.0), kind=kLoop, calls=%add, backend_config={"estimated_cycles":"500"}
  %async-collective-start = (bf16[64,128]{1,0}, bf16[256,128]{1,0}) fusion(%first), kind=kCustom, calls=%gathering
  %beside = f32[8,128]{1,0:T(8,128)} fusion(%first), kind=kCustom, calls=%async_collective_fusion.1, \
backend_config={"estimated_cycles":"2000"}
  %async-collective-done = bf16[256,128]{1,0} fusion(%beside), kind=kCustom, calls=%gathering
  %before = (s32[], f32[3,100,128], /*index=2*/f32[8,128]) tuple(%zero, %kept, %beside)
  %while.1 = (s32[], f32[3,100,128]{2,1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) while(%before), condition=%condition, \
body=%body, metadata={op_name="jit(train_step)/jvp()/while"}
  ROOT %result = f32[8,128]{1,0:T(8,128)} get-tuple-element(%while.1), index=2
}
"""
